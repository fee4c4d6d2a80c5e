"""Moves of the search over sequences: each asks the timeline for edits. Compiled.

``coin`` of 256 is the chance that an inserted recompute brings recomputes of what it reads and is gone by then: the
lazy closure. ``classes`` numbers the nodes that stand at the same place of a repeated block alike; group moves do in
every repeat what they do in one, or in those around it where there are many.
"""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.classes import Classes
from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.compiled import inner
from lowtide.solve.model.splitmix import random_below
from lowtide.solve.search.edits import ask, next_edit, note_all, record, step_before, take_back
from lowtide.solve.search.timeline import (
    ASKED,
    EDITS,
    FRONT,
    PENDING,
    RECOMPUTES,
    Timeline,
    before,
    change,
    next_use,
    put,
    take,
)

_SPREAD = 16  # slots per step, about
_GROUP = 64  # repeats that a group move takes; a loop over a sequence has thousands


@inner
def step_from(line: Timeline, slot: int) -> int:
    """The first slot from this one on in which a step stands; the end of the program stands in the last."""
    while line.node_at[slot] < 0:
        slot += 1
    return slot


@inner
def is_recompute(line: Timeline, slot: int) -> bool:
    return bool(line.slots[line.node_at[slot], 0] != slot)


@inner
def random_recompute(line: Timeline) -> int:
    """A slot, -1 where nothing is recomputed; mostly the end of a run of recomputes, for which the others were made."""
    if line.totals[RECOMPUTES] == 0:
        return -1
    slot = int(line.recompute[random_below(line.rng, line.totals[RECOMPUTES])])
    if random_below(line.rng, 4) != 0:
        following = step_from(line, slot + 1)
        while is_recompute(line, following):
            slot = following
            following = step_from(line, slot + 1)
    return slot


@inner
def random_read(t: CompactGraph, line: Timeline) -> tuple[int, int]:
    """The slot of a step and the index in ``t.reads`` of one of its reads that could be recomputed; -1 without one.

    Mostly a first compute that has not been near what it reads for long, else any step.
    """
    if random_below(line.rng, 4) != 0 and len(t.gaps) > 0:
        read = t.gaps[random_below(line.rng, len(t.gaps))]
        slot = line.slots[t.read_node[read], 0]
    else:
        pick = random_below(line.rng, t.nodes + 1 + line.totals[RECOMPUTES])
        slot = line.slots[pick, 0] if pick <= t.nodes else line.recompute[pick - t.nodes - 1]
        node = line.node_at[slot]
        reads = t.reads_start[node + 1] - t.reads_start[node]
        if reads == 0:
            return slot, -1
        read = t.reads_start[node] + random_below(line.rng, reads)
    base = t.storage_node[t.reads[read]]
    previous = step_before(line, slot)
    if not t.recomputable[base] or t.held[t.reads[read]] or previous < 0 or line.node_at[previous] == base:
        return slot, -1
    return slot, read


@inner
def chunk_start(line: Timeline, slot: int) -> int:
    """The first of the run of recomputes that ends just before the slot (the slot itself without one)."""
    previous = step_before(line, slot)
    while previous >= 0 and is_recompute(line, previous):
        slot = previous
        previous = step_before(line, slot)
    return slot


@inner
def insert_before_use(t: CompactGraph, line: Timeline) -> None:
    """Recompute what a random step reads just before it, or before the recomputes that precede it."""
    slot, read = random_read(t, line)
    if read < 0:
        return
    base = t.storage_node[t.reads[read]]
    if random_below(line.rng, 4) == 0:
        earlier = chunk_start(line, slot)
        if line.slots[base, before(line, base, slot)] >= earlier:
            return
        slot = earlier
    ask(line, base, slot, 1)


@inner
def group_around(classes: Classes, line: Timeline, node: int) -> tuple[int, int]:
    """From where to where in ``classes.members`` a group move about the node goes."""
    first, end = classes.start[classes.number[node]], classes.start[classes.number[node] + 1]
    if end - first > _GROUP:
        size = _GROUP >> random_below(line.rng, 4)
        place = first + np.searchsorted(classes.members[first:end], node)
        first = min(max(place - random_below(line.rng, size), first), end - size)
        end = first + size
    return first, end


@inner
def insert_in_group(t: CompactGraph, classes: Classes, line: Timeline) -> None:
    """As ``insert_before_use``, for the same read of every step of the same class."""
    slot, read = random_read(t, line)
    if read < 0:
        return
    node = line.node_at[slot]
    index = 1 if is_recompute(line, slot) else 0
    kind = classes.number[t.storage_node[t.reads[read]]]
    first, end = group_around(classes, line, node)
    for i in range(first, end):
        member = classes.members[i]
        if index >= line.computes[member]:
            continue
        at = line.slots[member, index]
        for j in range(t.reads_start[member], t.reads_start[member + 1]):
            base = t.storage_node[t.reads[j]]
            if classes.number[base] == kind and t.recomputable[base] and not t.held[t.reads[j]]:
                previous = step_before(line, at)
                if previous >= 0 and line.node_at[previous] != base:
                    ask(line, base, at, 1)
                break


@inner
def remove_one(line: Timeline) -> None:
    slot = random_recompute(line)
    if slot >= 0:
        ask(line, line.node_at[slot], slot, -1)


@inner
def remove_run(line: Timeline) -> None:
    """Remove a few consecutive recomputes."""
    slot = random_recompute(line)
    left = 2 + random_below(line.rng, 4)
    while slot >= 0 and left > 0 and is_recompute(line, slot):
        ask(line, line.node_at[slot], slot, -1)
        slot = step_before(line, slot)
        left -= 1


@inner
def remove_in_group(classes: Classes, line: Timeline) -> None:
    """Remove every recompute of a group."""
    slot = random_recompute(line)
    if slot < 0:
        return
    first, end = group_around(classes, line, line.node_at[slot])
    for i in range(first, end):
        member = classes.members[i]
        for index in range(1, line.computes[member]):
            ask(line, member, line.slots[member, index], -1)


@inner
def shift(t: CompactGraph, line: Timeline) -> None:
    """Move a recompute: to just before its next use or the use after that, or a random distance either way."""
    slot = random_recompute(line)
    if slot < 0:
        return
    node = line.node_at[slot]
    size = len(line.node_at)
    if random_below(line.rng, 2) == 0:
        distance = _SPREAD << random_below(line.rng, 7)
        goal = slot + random_below(line.rng, 2 * distance + 1) - distance
        earliest = line.slots[node, before(line, node, slot)] + 1
        goal = step_from(line, min(max(goal, earliest), size - 1))
    else:
        goal = next_use(t, line, node, slot)
        if goal < size and random_below(line.rng, 2) == 0:
            later = next_use(t, line, node, goal)
            goal = later if later < size else goal
    if goal < size and goal != slot:
        ask(line, node, goal, 1)
        ask(line, node, slot, -1)


@inner
def step_down(t: CompactGraph, line: Timeline) -> None:
    """Keep the result of a recompute by recomputing one of its inputs instead, or one of its readers."""
    slot = random_recompute(line)
    if slot < 0:
        return
    node = line.node_at[slot]
    other, at = -1, 0
    if random_below(line.rng, 2) == 0:
        reads = t.reads_start[node + 1] - t.reads_start[node]
        if reads > 0:
            read = t.reads_start[node] + random_below(line.rng, reads)
            at = step_from(line, slot + 1)
            other = -1 if t.held[t.reads[read]] else t.storage_node[t.reads[read]]
    else:
        owned = t.owns[t.owns_start[node]]
        users = t.uses_start[owned + 1] - t.uses_start[owned]
        if users > 0:
            other = t.uses[t.uses_start[owned] + random_below(line.rng, users)]
            at = next_use(t, line, other, slot)
    if other >= 0 and t.recomputable[other] and at < len(line.node_at) and line.slots[other, 0] < at:
        ask(line, other, at, 1)
    ask(line, node, slot, -1)


@inner
def propose(t: CompactGraph, classes: Classes, line: Timeline) -> None:
    """Ask for the edits of one random move, or for none. What is asked for last is done first."""
    draw = random_below(line.rng, 100)
    if draw < 58:
        insert_before_use(t, line)
    if 49 <= draw < 71:
        remove_one(line)  # from 49 to 57 together with the insertion: a swap
    elif 71 <= draw < 74:
        remove_run(line)
    elif 74 <= draw < 85:
        shift(t, line)
    elif 85 <= draw < 91:
        step_down(t, line)
    elif 91 <= draw < 98:
        insert_in_group(t, classes, line)
    elif draw >= 98:
        remove_in_group(classes, line)


@inner
def next_move(t: CompactGraph, classes: Classes, line: Timeline, rejected: bool, coin: int) -> bool:
    """Take back the last move if it was rejected, then carry out a random one; false where it came to nothing."""
    if not rejected:
        line.totals[EDITS] = 0
    undoing = True
    while True:
        if undoing:
            node, slot, sign = take_back(line)
            if sign == 0:
                undoing = False
                propose(t, classes, line)
                continue
        else:
            node, slot, sign = next_edit(t, line, coin)
            if sign == 0 or line.totals[EDITS] == len(line.journal):
                break
            record(line, node, slot, sign)
        if sign < 0:
            take(line, node, slot)
        change(t, line, node, slot, sign)
        if sign > 0:
            put(line, node, slot)
        if not undoing:
            note_all(t, line, node, slot, sign)
    line.totals[ASKED] = 0
    line.totals[PENDING] = 0
    line.totals[FRONT] = -1
    return bool(line.totals[EDITS] > 0)
