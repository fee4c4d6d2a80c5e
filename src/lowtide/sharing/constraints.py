"""What must fit into the budget at each point of a step that several programs share.

Between its two passes a program holds what it saves while the others run. So at every point the sum of what is held by no
program, of what is saved by those that wait for their backward pass, and of the running one's own peak stays within the
budget.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.ir import Costs, Kind, Schedule, keep_all_schedule, simulate
from lowtide.program.program import Program
from lowtide.solve import working_set_bound

_SCALAR_BYTES = 8  # what runs eagerly may keep a number that an operator was given, as a tensor, for the backward pass


@dataclass(frozen=True, slots=True)
class Constraint:
    """One point of the step, at which all that is held must fit into the budget.

    ``base_bytes`` are held by no member. ``running`` is the member that runs its forward or ``backward`` pass, ``saved`` are
    those that hold what they saved (as often as they ran). Members are counted from 0; -1 stands for none. ``released_bytes``
    of the base are there for members alone, which hold their arguments: plain PyTorch would have let them go.
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
    """Memory of one member: what it saves between its passes, and the peaks of these. Somebody may hold what it returned until
    the end."""

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
    """For each member, what is left of the budget while it runs, where all save these bytes."""
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
    """Of a step that runs the members in ``order`` (a member may come several times), and backward in reverse.

    For each run, ``bases`` are the bytes that no member holds in its forward and in its backward pass, and ``gradients``
    the bytes that later runs have left when its backward pass begins. ``waiting`` are the places in ``order`` of the runs that
    hold what they saved meanwhile: all before it, unless some have both of their passes within the backward pass of the step.
    ``released``: of the bases, what each run alone holds of its arguments.
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
    """A program that shares the budget, and its costs."""

    program: Program
    costs: Costs

    def footprint(self, schedule: Schedule) -> Footprint:
        """What the program takes by this schedule."""
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
        """Without recomputation."""
        return self.footprint(keep_all_schedule(self.program.graph))

    @functools.cached_property
    def eager(self) -> Footprint:
        """As PyTorch runs it, which writes over nothing and may keep the numbers that operators are given."""
        found = self.footprint(keep_all_schedule(self.program.graph.without_overwrites()))
        numbers = _SCALAR_BYTES * self.program.graph.forward_ops
        return Footprint(*(each + numbers for each in dataclasses.astuple(found)))

    @functools.cached_property
    def output_bytes(self) -> int:
        """Bytes of the forward outputs: what stays whatever is recomputed."""
        return self._bytes_of(self.program.graph.forward_outputs)

    @functools.cached_property
    def gradient_bytes(self) -> tuple[tuple[int, int], ...]:
        """Flat inputs that have a gradient, each with the bytes of one of its terms."""
        storages, sizes = [value.storage for value in self.program.graph.values], self.costs.storage_bytes
        first = dict(reversed(self.program.gradients))
        return tuple((position, int(sizes[storages[value]])) for position, value in first.items())

    @functools.cached_property
    def least_bytes(self) -> int:
        """Bytes that it needs while it runs, by whatever plan."""
        return working_set_bound(self.program.graph, self.costs)

    def limit_bytes(self, fraction: float) -> int:
        """Its outputs and this fraction of what it saves beyond them without a plan."""
        return self.output_bytes + int(fraction * max(self.eager.saved_bytes - self.output_bytes, 0))

    @functools.cached_property
    def freed_bytes(self) -> int:
        """Most that plans can free of what it saves without one, beside its outputs."""
        return max(self.keep_all.saved_bytes - self.output_bytes, 0)

    @functools.cached_property
    def held_inputs(self) -> tuple[int, ...]:
        """Flat inputs that are no state and that its backward pass does not read without recomputation: where PyTorch lets them
        go, a program that may run again holds them."""
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
        """Bytes of the gradients that come back for the outputs."""
        return self._bytes_of(self.program.graph.arriving)

    def _bytes_of(self, values: Iterable[int]) -> int:
        storages = {self.program.graph.values[value].storage for value in values}
        return sum(int(self.costs.storage_bytes[storage]) for storage in storages)
