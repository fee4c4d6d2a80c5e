"""A record of what ran in a step, to plan the next ones. If steps differ, it is the union of them: the fullest step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from lowtide.errors import InfeasibleBudgetError
from lowtide.planning import Plan
from lowtide.runtime.parts.forward_pass import ForwardPass, left_gradient_bytes, waiting_places
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry, exchange, with_plan
from lowtide.sharing import Constraint, Footprint, Member, peak_bytes, sequential_constraints
from lowtide.sharing.assignment import saved_fraction
from lowtide.sharing.pass_budget import StepBudget

Key = tuple[int, int]
Known = Callable[[ForwardPass], tuple[Member, Footprint]]  # the program of a pass, and its memory by its plan
Gap = tuple[int, tuple[ForwardPass, ...]]  # most bytes held by no program, and the passes that waited then


class StepRecord:
    """``passes``: in order. ``gaps``: the most bytes that no program held while the passes up to this key waited.
    ``over``: by how many bytes the passes exceed the budget, and the budget, once computed."""

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.gaps: dict[Key | None, int] = {}
        self.over: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.passes or any(self.gaps.values()))

    def replace(self, ran: Sequence[ForwardPass], gaps: Sequence[Gap]) -> None:
        """Record the last step only."""
        self.passes, self.gaps = [], {}
        self.merge(ran, gaps, lambda _: 0)

    def merge(self, ran: Sequence[ForwardPass], gaps: Sequence[Gap], size: Callable[[ForwardPass], int]) -> None:
        """Add another step: new passes are inserted in their place. Of a pass in both, the larger one by ``size`` is
        kept."""
        place, places = 0, {one.key: number for number, one in enumerate(self.passes)}
        before = self.passes.copy(), self.gaps.copy()
        for one in ran:
            known = places.get(one.key)
            if known is None:
                self.passes.insert(place, one)
                places = {other.key: number for number, other in enumerate(self.passes)}
            else:
                place = known
                other = self.passes[place]
                larger = one if size(one) >= size(other) and not one.is_like(other) else other
                between, backward = map(max, one.between, other.between)
                if larger is one or (between, backward) != other.between:
                    self.passes[place] = dataclasses.replace(
                        larger, between_bytes=between, backward_between_bytes=backward
                    )
            place += 1
        for held, waiting in gaps:
            last = waiting[-1].key if waiting else None
            self.gaps[last] = max(held, self.gaps.get(last, 0))
        if (self.passes, self.gaps) != before:
            self.over = None

    def expect(self, expected: Callable[[list[ForwardPass]], list[ForwardPass]]) -> None:
        """Add passes that may run too."""
        passes = expected(self.passes)
        if passes is not self.passes:
            self.passes, self.over = passes, None

    def exchange(self, plans: Mapping[Entry, Plan]) -> None:
        """Use ``plans`` for these entries from now on. The record is updated too, since some of its passes may not run
        again soon."""
        exchanged = {entry: with_plan(entry, plan) for entry, plan in plans.items()}
        for graph in dict.fromkeys(one.graph for one in self.passes):
            exchange(graph.entries, exchanged)
        self.passes = [dataclasses.replace(one, entry=exchanged[one.entry]) for one in self.passes]
        self.over = None

    @property
    def are_several(self) -> bool:
        """Whether the plan of one program is not the whole picture."""
        return len(self.passes) > 1 or any(self.gaps.values())

    @property
    def most_between(self) -> int:
        """The most bytes that code between programs held."""
        return max([*self.gaps.values(), *(max(one.between) for one in self.passes)], default=0)

    def constraints(self, order: Sequence[int]) -> list[Constraint]:
        """The memory constraints of the passes and of the gaps between them. ``order``: the member of each pass."""
        places, waiting = {one.key: place for place, one in enumerate(self.passes)}, waiting_places(self.passes)

        between, released = [one.between for one in self.passes], [one.released_bytes for one in self.passes]

        def gap(last: Key | None, most: int) -> Constraint:
            held = (*waiting[places[last]], places[last]) if last in places else ()
            return Constraint(most, -1, False, tuple(order[one] for one in held), sum(released[one] for one in held))

        gaps = itertools.starmap(gap, self.gaps.items())
        return [*sequential_constraints(order, between, left_gradient_bytes(self.passes), waiting, released), *gaps]

    def exceeds(self, known: Known, budget: StepBudget) -> tuple[int, int]:
        """By how many bytes the recorded passes exceed the budget together, and the budget."""
        if self.over is None:
            constraints = self.constraints(range(len(self.passes)))
            taken = list(map(known, self.passes))
            total, _ = budget.of([member for member, _ in taken], constraints)
            self.over = peak_bytes(constraints, [footprint for _, footprint in taken]) - total, total
        return self.over

    def fraction_of(self, graph: Planned, known: Known, otherwise: float) -> float:
        """The fraction of its saved bytes that a program of ``graph`` may keep: as in the fullest step, else
        ``otherwise``."""
        taken = [known(one) for one in self.passes if one.graph is graph]
        return min((saved_fraction([footprint], [member]) for member, footprint in taken), default=otherwise)

    def together(self, known: Known) -> tuple[dict[Entry, Member], list[Constraint]]:
        """The programs of all passes, and the constraints on them."""
        members = {one.entry: known(one)[0] for one in self.passes}
        places = {entry: place for place, entry in enumerate(members)}
        return members, self.constraints([places[one.entry] for one in self.passes])

    def infeasible(self, error: InfeasibleBudgetError, what: str, budget: int) -> InfeasibleBudgetError:
        """The error for a joint plan of all passes that does not fit. ``what``: what to call them."""
        between, needed = self.most_between, f"{error.minimum_bytes} bytes"
        held = f", {between} of them for code between them, or gradients" if between else ""
        step = f"the {len(self.passes)} {what} of the step need {needed} together{held}"
        if not self.passes:
            step = f"none of the {what} of the step can be planned, and code between them holds {needed} or more"
        advice = "avoid the graph breaks" if what == "graphs" else "run the model under lowtide.online"
        return InfeasibleBudgetError(
            f"{step}, more than the budget of {budget}; raise it, or {advice}.",
            minimum_bytes=error.minimum_bytes,
            budget_bytes=budget,
        )
