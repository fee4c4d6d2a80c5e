"""What a move of the search does to the timeline, edit by edit. Compiled.

A move asks for edits (``ask``). Each insertion may bring its lazy closure; each edit may leave recomputes without use,
which are removed as well; all of them are in the journal, from which a rejected move is taken back.
"""

from __future__ import annotations

from lowtide.solve.model.compact import CompactGraph, Numbers
from lowtide.solve.model.compiled import inner
from lowtide.solve.model.splitmix import random_below
from lowtide.solve.search.timeline import (
    ASKED,
    BACK,
    CRAMPED,
    EDITS,
    FRONT,
    LOW,
    PENDING,
    RECOMPUTES,
    Timeline,
    Triples,
    before,
    compute_after,
    last_use,
)


@inner
def note(line: Timeline, node: int, slot: int) -> None:
    """Remember to look whether a recompute is still used; the node's compute before the slot is meant."""
    index = before(line, node, slot)
    if index > 0 and line.totals[PENDING] < len(line.pending):
        line.pending[line.totals[PENDING], 0] = node
        line.pending[line.totals[PENDING], 1] = line.slots[node, index]
        line.totals[PENDING] += 1


@inner
def note_all(t: CompactGraph, line: Timeline, node: int, slot: int, sign: int) -> None:
    """Whoever may have lost the last use by the edit."""
    if sign > 0:
        note(line, node, slot)
        note(line, node, slot + 1)
        return
    for i in range(t.reads_start[node], t.reads_start[node + 1]):
        note(line, t.storage_node[t.reads[i]], slot)


@inner
def append(entries: Triples, totals: Numbers, counter: int, node: int, slot: int, sign: int) -> None:
    """Enter an edit in the list that ``totals[counter]`` counts; nothing where it is full."""
    count = totals[counter]
    if count < len(entries):
        entries[count, 0] = node
        entries[count, 1] = slot
        entries[count, 2] = sign
        totals[counter] = count + 1


@inner
def record(line: Timeline, node: int, slot: int, sign: int) -> None:
    append(line.journal, line.totals, EDITS, node, slot, sign)


@inner
def ask(line: Timeline, node: int, slot: int, sign: int) -> None:
    """Request an edit: insertion just before the step in the slot, or removal of the recompute in it."""
    append(line.asked, line.totals, ASKED, node, slot, sign)


@inner
def used(t: CompactGraph, line: Timeline, node: int, slot: int) -> bool:
    """Whether something reads what the compute in the slot allocates, before the node's next compute."""
    high = compute_after(line, node, before(line, node, slot + 1))
    for i in range(t.owns_start[node], t.owns_start[node + 1]):
        storage = t.owns[i]
        if not t.held[storage] and last_use(t, line, storage, slot, high) > slot:
            return True
    return False


@inner
def step_before(line: Timeline, slot: int) -> int:
    """The slot of the step before, -1 without one."""
    slot -= 1
    while slot >= 0 and line.node_at[slot] < 0:
        slot -= 1
    return slot


@inner
def closure_node(t: CompactGraph, line: Timeline, front: int, back: int, low: int) -> int:
    """The last node before ``low`` that the steps from ``front`` to ``back`` read and nobody does after them, so that
    it may have been gone; -1 without one."""
    chosen = -1
    for slot in range(front, back + 1):
        node = line.node_at[slot]
        for i in range(t.reads_start[node], t.reads_start[node + 1]):
            storage = t.reads[i]
            base = t.storage_node[storage]
            if base <= chosen or base >= low or not t.recomputable[base] or t.held[storage]:
                continue
            index = before(line, base, front)
            if last_use(t, line, storage, line.slots[base, index], compute_after(line, base, index)) <= back:
                chosen = base
    return chosen


@inner
def next_edit(t: CompactGraph, line: Timeline, coin: int) -> tuple[int, int, int]:
    """Node, slot and sign of what is to be done next for the present move; sign 0 at its end.

    First the lazy closure of the last insertion, then what was asked for, then recomputes that have become useless.
    """
    while line.totals[FRONT] >= 0 and coin > 0:
        front, back, low = line.totals[FRONT], line.totals[BACK], line.totals[LOW]
        if line.node_at[front - 1] >= 0:
            line.totals[CRAMPED] += 1
            break
        chosen = closure_node(t, line, front, back, low)
        if chosen < 0:
            break
        line.totals[LOW] = chosen
        if random_below(line.rng, 256) < coin and room_for(t, line, chosen):
            line.totals[FRONT] = front - 1
            return chosen, front - 1, 1
    line.totals[FRONT] = -1
    while line.totals[ASKED] > 0:
        line.totals[ASKED] -= 1
        entry = line.totals[ASKED]
        node, slot, sign = line.asked[entry, 0], line.asked[entry, 1], line.asked[entry, 2]
        if sign < 0:
            return node, slot, sign
        previous = step_before(line, slot)
        if slot - previous < 2:
            line.totals[CRAMPED] += 1
        elif previous >= line.slots[node, 0] and room_for(t, line, node):
            at = slot - max((slot - previous) // 4, 1) if coin > 0 else (previous + slot) // 2
            line.totals[FRONT], line.totals[BACK], line.totals[LOW] = at, at, node
            return node, at, sign
    while line.totals[PENDING] > 0:
        line.totals[PENDING] -= 1
        node, slot = line.pending[line.totals[PENDING], 0], line.pending[line.totals[PENDING], 1]
        if line.node_at[slot] == node and slot != line.slots[node, 0] and not used(t, line, node, slot):
            return node, slot, -1
    return 0, 0, 0


@inner
def room_for(t: CompactGraph, line: Timeline, node: int) -> bool:
    """Whether the tables have room for one more recompute of the node."""
    full = 2 * (line.totals[RECOMPUTES] + t.nodes) > len(line.node_at)
    return not full and line.computes[node] < line.slots.shape[1]


@inner
def take_back(line: Timeline) -> tuple[int, int, int]:
    """The inverse of the last edit in the journal; sign 0 where it is empty."""
    if line.totals[EDITS] == 0:
        return 0, 0, 0
    line.totals[EDITS] -= 1
    entry = line.totals[EDITS]
    return line.journal[entry, 0], line.journal[entry, 1], -line.journal[entry, 2]
