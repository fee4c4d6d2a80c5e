"""What must fit into the budget at each point of a step that several programs share.

Between its two passes, a program holds what it saves while the others run. At every point, the budget must cover the
bytes that no program holds, what waiting programs have saved, and the peak of the running program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.ir import Costs, Kind, Schedule, keep_all_schedule, simulate
from lowtide.program.program import Program
from lowtide.solve import working_set_bound

_SCALAR_BYTES = 8  # eager execution may save a number passed to an operator as a tensor


@dataclass(frozen=True, slots=True)
class Constraint:
    """One point of the step, at which all that is held must fit into the budget.

    ``base_bytes``: held by no member. ``running``: the member that runs its forward or ``backward`` pass, -1 for none.
    ``saved``: the members that wait with what they saved, as often as they ran. ``released_bytes``: the part of the
    base that plain PyTorch would have freed: arguments that only members hold.
    """

    base_bytes: int
    running: int
    backward: bool
    saved: tuple[int, ...]
    released_bytes: int = 0

    def total_bytes(self, footprints: Sequence[Footprint]) -> int:
        total = self.base_bytes + sum(footprints[member].saved_bytes for member in self.saved)
        if self.running >= 0:
            own = footprints[self.running]
            total += own.backward_bytes if self.backward else own.forward_bytes
        return total


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one member: what it saves between its passes, and the peak of each pass. Outputs may be held until the
    end."""

    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    @property
    def running_bytes(self) -> int:
        return max(self.forward_bytes, self.backward_bytes)


def peak_bytes(constraints: Iterable[Constraint], footprints: Sequence[Footprint]) -> int:
    """The peak of the whole step."""
    return max(constraint.total_bytes(footprints) for constraint in constraints)


def plain_peak_bytes(constraints: Iterable[Constraint], members: Sequence[Member]) -> int:
    """The peak of the whole step without plans."""
    footprints = [member.keep_all for member in members]
    return max(constraint.total_bytes(footprints) - constraint.released_bytes for constraint in constraints)


def rooms(constraints: Iterable[Constraint], saved_bytes: Sequence[int], budget_bytes: int) -> list[int]:
    """For each member, the part of the budget left while it runs, if all save these bytes."""
    left = [budget_bytes] * len(saved_bytes)
    for one in constraints:
        if one.running >= 0:
            held = one.base_bytes + sum(saved_bytes[member] for member in one.saved)
            left[one.running] = min(left[one.running], budget_bytes - held)
    return left


def sequential_constraints(
    order: Sequence[int],
    bases: Sequence[tuple[int, int]],
    gradients: Sequence[int],
    waiting: Sequence[Sequence[int]] | None = None,
    released: Sequence[int] | None = None,
) -> list[Constraint]:
    """Constraints of a step that runs the members in ``order`` (a member may occur several times), and backward in
    reverse.

    For each run: ``bases`` are the bytes that no member holds in its forward and in its backward pass; ``gradients``
    the bytes that later runs have left when its backward pass begins; ``waiting`` the places in ``order`` of the runs
    that wait meanwhile (default: all earlier runs; differs for runs with both passes inside the step's backward pass);
    ``released`` the part of the bases that is arguments held by this run only.
    """
    found, let_go = [], [0] * len(bases) if released is None else released
    for index, (forward, backward) in enumerate(bases):
        places = range(index) if waiting is None else waiting[index]
        saved, before = tuple(order[place] for place in places), sum(let_go[place] for place in places)
        found.append(Constraint(forward, order[index], False, saved, before))
        found.append(Constraint(backward + gradients[index], order[index], True, saved, before + let_go[index]))
    return found


@dataclass(frozen=True, eq=False)
class Member:
    """A program that shares the budget, with its costs."""

    program: Program
    costs: Costs

    def footprint(self, schedule: Schedule) -> Footprint:
        """The memory that the program takes with this schedule."""
        run, boundary = simulate(self.program.graph, self.costs, schedule), schedule.boundary
        timeline, tensors = run.timeline, (made for made in run.allocations if made.kind is Kind.TENSOR)
        saved = sum(made.bytes for made in tensors if made.first < boundary <= made.last)
        return Footprint(
            saved,
            int(timeline[:boundary].max(initial=0)),
            int(timeline[boundary:].max(initial=0)),
        )

    @functools.cached_property
    def keep_all(self) -> Footprint:
        """The footprint without recomputation."""
        return self.footprint(keep_all_schedule(self.program.graph))

    @functools.cached_property
    def eager(self) -> Footprint:
        """The footprint in eager PyTorch, which overwrites nothing and may save numbers passed to operators."""
        found = self.footprint(keep_all_schedule(self.program.graph.without_overwrites()))
        numbers = _SCALAR_BYTES * self.program.graph.forward_ops
        return Footprint(*(each + numbers for each in dataclasses.astuple(found)))

    @functools.cached_property
    def output_bytes(self) -> int:
        """Bytes of the forward outputs; no plan frees these."""
        return self._bytes_of(self.program.graph.forward_outputs)

    @functools.cached_property
    def gradient_bytes(self) -> tuple[tuple[int, int], ...]:
        """Flat inputs with a gradient, each with the bytes of one term of it."""
        storages, sizes = [value.storage for value in self.program.graph.values], self.costs.storage_bytes
        first = dict(reversed(self.program.gradients))
        return tuple((position, int(sizes[storages[value]])) for position, value in first.items())

    @functools.cached_property
    def least_bytes(self) -> int:
        """A lower bound on the bytes that it needs while it runs, for every plan."""
        return working_set_bound(self.program.graph, self.costs)

    def limit_bytes(self, fraction: float) -> int:
        """The bytes of its outputs, plus this fraction of what it saves beyond them without a plan."""
        return self.output_bytes + int(fraction * max(self.eager.saved_bytes - self.output_bytes, 0))

    @functools.cached_property
    def freed_bytes(self) -> int:
        """The most bytes that a plan can free of what it saves, beside its outputs."""
        return max(self.keep_all.saved_bytes - self.output_bytes, 0)

    @functools.cached_property
    def held_inputs(self) -> tuple[int, ...]:
        """Flat inputs that are not state and that its backward pass reads only for recomputation. PyTorch would free
        them; a planned program holds them."""
        graph, first = self.program.graph, len(self.program.state_names)
        read = {graph.values[value].storage for op in graph.ops[graph.forward_ops :] for value in op.inputs}
        given = enumerate(self.program.inputs[first:], first)
        return tuple(i for i, value in given if value is not None and graph.values[value].storage not in read)

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of ``held_inputs``."""
        return self._bytes_of(value for i in self.held_inputs if (value := self.program.inputs[i]) is not None)

    @functools.cached_property
    def arriving_bytes(self) -> int:
        """Bytes of the gradients that arrive for the outputs."""
        return self._bytes_of(self.program.graph.arriving)

    def _bytes_of(self, values: Iterable[int]) -> int:
        storages = {self.program.graph.values[value].storage for value in values}
        return sum(int(self.costs.storage_bytes[storage]) for storage in storages)
