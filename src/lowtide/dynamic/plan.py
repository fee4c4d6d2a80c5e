"""How evicted nodes are rebuilt: which calls are made again, in which order, and when each result may go.

A sequence of calls says all: a result lives from its call to the last call that reads it before it is made anew, and a
call whose results nobody reads is left out. What is still in memory may be *given*: it then takes the place of what its
first call would make, and is held until the last read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from lowtide.dynamic.ancestry import Rematerialization
from lowtide.dynamic.node import Node

_PARTS = 16  # in which it is tried to hold what is there


@dataclass(frozen=True, slots=True, eq=False)
class RebuildStep:
    """A call, what is wanted of its results, what is read by it for the last time, and what all takes up during it."""

    call: Rematerialization
    makes: tuple[Node, ...]
    done: tuple[Node, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RebuildPlan:
    """``given`` is held from the start. ``peak_bytes``: of all that is given or made, nothing else counted."""

    given: tuple[Node, ...]
    steps: tuple[RebuildStep, ...]
    peak_bytes: int


def make_plan(
    sequence: Sequence[Rematerialization], targets: Iterable[Node], given: Collection[Node] = ()
) -> RebuildPlan:
    """What is left of ``sequence`` if ``given`` is there; of that, what is not read is not held."""
    first: dict[Node, int] = {}
    if given:
        for index in range(len(sequence) - 1, -1, -1):
            first.update((node, index) for node in sequence[index].makes if node in given)
    needed = dict.fromkeys(targets)
    found: list[tuple[Rematerialization, tuple[Node, ...], tuple[Node, ...]]] = []
    for index in range(len(sequence) - 1, -1, -1):
        call = sequence[index]
        makes = tuple(n for n in call.makes if n in needed and first.get(n) != index)
        if not makes:
            continue
        for node in makes:
            del needed[node]
        done = tuple(node for node in call.reads if node not in needed)
        needed.update(dict.fromkeys(done))
        found.append((call, makes, done))
    found.reverse()
    level = peak = sum(node.size_bytes for node in needed)
    steps = []
    for call, makes, done in found:
        during = level + call.bytes + call.scratch_bytes
        peak = max(peak, during)
        steps.append(RebuildStep(call, makes, done, during))
        level += sum(node.size_bytes for node in makes) - sum(node.size_bytes for node in done)
    return RebuildPlan(tuple(needed), tuple(steps), peak)


def with_what_is_there(
    sequence: Sequence[Rematerialization], targets: Sequence[Node], there: Iterable[Node], room: int
) -> RebuildPlan:
    """The plan that holds as much of what is there as fits into ``room`` bytes, late results before early ones.

    It may exceed the room all the same: then by no more than if it held nothing.
    """
    latest_first = sorted(there, key=lambda node: -node.serial)
    plan = make_plan(sequence, targets, set(latest_first))
    if plan.peak_bytes <= room:
        return plan
    held: set[Node] = set()
    plan = make_plan(sequence, targets)
    least = max(1, len(latest_first) // _PARTS)
    waiting = [latest_first]
    while waiting:
        part = waiting.pop()
        trial = make_plan(sequence, targets, held.union(part))
        if trial.peak_bytes <= max(room, plan.peak_bytes):
            held.update(part)
            plan = trial
        elif len(part) > least:
            half = (len(part) + 1) // 2
            waiting += [part[half:], part[:half]]
    return plan
