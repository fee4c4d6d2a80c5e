"""``griewank``: binomial checkpointing of the chain of units between articulation points.

The forward pass is cut at its articulation points into unit steps; a *state* is the data that crosses a cut. There are ``s``
slots for states; the slot of the first state, the program's inputs, takes no memory. Steps are reversed from the last to the
first: the state before a step is recomputed from the nearest state in a slot, and slots are refilled on the way. The choice
of states is optimal for equal steps (Griewank and Walther 2000, Algorithm 799: REVOLVE, ACM TOMS 26(1)), in closed form:

    l         steps to reverse, s >= 1 slots, that of the first state included
    beta(s,r) = C(s + r, s)          the most steps that s slots reverse with r repetitions of a step
    t(l,s)    = r l - beta(s + 1, r - 1),   beta(s, r - 1) < l <= beta(s, r)         forward steps that are needed
    t(l,s)    = min over 0 < m < l of  m + t(l - m, s - 1) + t(m, s)                m: the next state to go to a slot

Optimal in recomputed steps on a chain of equal nodes, t(l, s) - l + 1 of them. On other graphs nothing is guaranteed; the
number of slots is swept and the quickest candidate that fits is the answer. Reads across several steps use any result that is
still live. Time: (numbers of slots tried) x (length of the sequences); for one slot the length is quadratic in the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from lowtide.solve.chen import checkpointing
from lowtide.solve.model.checkpoints import FIXED, SLOT, LiveResults, Readers
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.structure import articulation_points

_ALL_SLOTS = 64  # try every number of slots up to this, then grow it by 1/64 at a time


def repetitions(steps: int, slots: int) -> int:
    """Return the least r with ``steps <= beta(slots, r)``."""
    r = 0
    while math.comb(slots + r, slots) < steps:
        r += 1
    return r


def next_slot(steps: int, slots: int) -> int:
    """Return an optimal m: the steps from the current state to the next state to store, for at least 2 steps and 2 slots."""
    r = repetitions(steps, slots)
    lower = math.comb(slots + r - 2, slots) if r >= 2 else 1
    return max(lower, steps - math.comb(slots - 1 + r, slots - 1), 1)


Action = tuple[str, int]


def reversal(steps: int, slots: int) -> Iterator[Action]:
    """Yield the actions in order: ``("store", state)``, ``("reverse", step)``, ``("discard", state)``. State ``i`` is the
    input of step ``i``; state 0 is always stored. Steps are reversed from the last to the first."""
    pending: list[tuple[str, int, int, int]] = [("chain", 0, steps, slots)]
    while pending:
        kind, low, high, left = pending.pop()
        if kind == "discard":
            yield kind, low
        elif high - low == 1 or left == 1:
            yield from (("reverse", step) for step in range(high - 1, low - 1, -1))
        else:
            middle = low + next_slot(high - low, left)
            yield "store", middle
            pending.append(("chain", low, middle, left))
            pending.append(("discard", middle, 0, 0))
            pending.append(("chain", middle, high, left - 1))


def states_of(model: CompactGraph) -> list[int]:
    """Return the articulation points without the last forward node, which no step follows."""
    return [point for point in articulation_points(model) if point < model.boundary - 1]


def _all_sequences(readers: Readers) -> Iterator[Indices]:
    states = states_of(readers.model)
    slots = 1
    while slots <= len(states) + 1:
        yield slot_sequence(readers, states, slots)
        slots += 1 + slots // _ALL_SLOTS


def slot_sequence(readers: Readers, states: list[int], slots: int) -> Indices:
    """Return the encoded sequence of the reversal with ``slots`` slots, including that of the program's inputs."""
    memory = _Slots(readers, states, slots)
    memory.advance_to(len(states), -1)
    for node in memory.stored:
        memory.there[node] |= SLOT
    return memory.backward(states)


class _Slots(LiveResults):
    """Live results of the reversal; ``stored`` are the states that belong in slots now."""

    def __init__(self, readers: Readers, states: list[int], slots: int) -> None:
        super().__init__(readers, range(states[-1] if states else 0, readers.model.boundary))
        self.states = states
        self.actions = reversal(len(states) + 1, slots)
        self.step = len(states) + 1  # the latest step that was reversed
        self.stored: set[int] = set()

    def advance_to(self, step: int, position: int) -> None:
        """Carry out the stores and discards up to the reversal of ``step``; does nothing if that is past."""
        while self.step > step:
            kind, index = next(self.actions)
            if kind == "reverse":
                self.step = index
                continue
            node = self.states[index - 1]
            if kind == "store":
                self.stored.add(node)
                continue
            self.stored.discard(node)
            if self.there[node] & SLOT:
                self.there[node] &= ~SLOT
                self.want([node], position)

    def renew(self, segment: int, nodes: range, step: int) -> list[int]:
        self.advance_to(segment, step)
        computed = super().renew(segment, nodes, step)
        for node in computed:
            if node in self.stored and not self.there[node] & FIXED:
                self.there[node] |= SLOT
        return computed


Griewank = checkpointing("Griewank", _all_sequences)
