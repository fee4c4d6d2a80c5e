"""What ran in a step, for planning the next ones; of a model whose steps differ, the fullest step that they make up."""

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
Known = Callable[[ForwardPass], tuple[Member, Footprint]]  # the program of a pass, and what it takes by its plan
Gap = tuple[int, tuple[ForwardPass, ...]]  # most bytes held by no program, and who waited for its backward pass


class StepRecord:
    """``passes`` in order; ``gaps``: the most bytes that no program held while passes up to this one waited. ``over``: by
    how many bytes they exceed the budget, and that, once that was asked."""

    def __init__(self) -> None:
        self.passes: list[ForwardPass] = []
        self.gaps: dict[Key | None, int] = {}
        self.over: tuple[int, int] | None = None

    def __bool__(self) -> bool:
        return bool(self.passes or any(self.gaps.values()))

    def replace(self, ran: Sequence[ForwardPass], gaps: Sequence[Gap]) -> None:
        """The last step alone."""
        self.passes, self.gaps = [], {}
        self.merge(ran, gaps, lambda _: 0)

    def merge(self, ran: Sequence[ForwardPass], gaps: Sequence[Gap], size: Callable[[ForwardPass], int]) -> None:
        """Another step: what is new in it runs too, in its place; of what ran in both, the larger one by ``size`` counts."""
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
        """What may run besides, too."""
        passes = expected(self.passes)
        if passes is not self.passes:
            self.passes, self.over = passes, None

    def exchange(self, plans: Mapping[Entry, Plan]) -> None:
        """Have programs run by these ``plans`` from now on: here as well, since a pass of a fuller step than the next ones may
        not come again soon."""
        exchanged = {entry: with_plan(entry, plan) for entry, plan in plans.items()}
        for graph in dict.fromkeys(one.graph for one in self.passes):
            exchange(graph.entries, exchanged)
        self.passes = [dataclasses.replace(one, entry=exchanged[one.entry]) for one in self.passes]
        self.over = None

    @property
    def are_several(self) -> bool:
        """Whether the plan of one program does not tell all."""
        return len(self.passes) > 1 or any(self.gaps.values())

    @property
    def most_between(self) -> int:
        """The most that code between programs held."""
        return max([*self.gaps.values(), *(max(one.between) for one in self.passes)], default=0)

    def constraints(self, order: Sequence[int]) -> list[Constraint]:
        """Of the passes, by members in this ``order``, and of the gaps between."""
        places, waiting = {one.key: place for place, one in enumerate(self.passes)}, waiting_places(self.passes)

        between, released = [one.between for one in self.passes], [one.released_bytes for one in self.passes]

        def gap(last: Key | None, most: int) -> Constraint:
            held = (*waiting[places[last]], places[last]) if last in places else ()
            return Constraint(most, -1, False, tuple(order[one] for one in held), sum(released[one] for one in held))

        gaps = itertools.starmap(gap, self.gaps.items())
        return [*sequential_constraints(order, between, left_gradient_bytes(self.passes), waiting, released), *gaps]

    def exceeds(self, known: Known, budget: StepBudget) -> tuple[int, int]:
        """By how much what ran exceeds the budget together, and that."""
        if self.over is None:
            constraints = self.constraints(range(len(self.passes)))
            taken = list(map(known, self.passes))
            total, _ = budget.of([member for member, _ in taken], constraints)
            self.over = peak_bytes(constraints, [footprint for _, footprint in taken]) - total, total
        return self.over

    def fraction_of(self, graph: Planned, known: Known, otherwise: float) -> float:
        """Of what a program of ``graph`` would save, the part that it may: as much as it saves in the fullest step."""
        taken = [known(one) for one in self.passes if one.graph is graph]
        return min((saved_fraction([footprint], [member]) for member, footprint in taken), default=otherwise)

    def together(self, known: Known) -> tuple[dict[Entry, Member], list[Constraint]]:
        """The programs of all passes, and what must fit."""
        members = {one.entry: known(one)[0] for one in self.passes}
        places = {entry: place for place, entry in enumerate(members)}
        return members, self.constraints([places[one.entry] for one in self.passes])

    def infeasible(self, error: InfeasibleBudgetError, what: str, budget: int) -> InfeasibleBudgetError:
        """``error`` of planning all passes together, in words. ``what`` they are."""
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
