"""A sequence of computes under edits, with its bytes over time and its recompute time kept up to date. Compiled.

Steps stand in slots, with free slots between them for insertions. A storage lives from each compute of its base to the
last use before the next one; the profile holds, per slot, the bytes of the lives that cover it and the workspace of the
step there. Inserting or removing one recompute touches the lives of what it reads and of what it allocates, so an
edit costs time in proportion to the operator's neighbours and the square root of the length, not to the length:

- what it reads lives on to the new step, where its life ended before;
- what it allocates is renewed: the life that covers the step is cut at the last use before it;
- a recompute whose results nobody uses any more is removed as well, and so on;
- what ends elsewhere now, or not any more, is written over there, or not any more.

``change`` with sign -1 undoes exactly what it did with sign 1: a rejected move is undone from the journal of its edits.
The same semantics as ``lowtide.solve.model.sweep``, which checks it in the tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.solve.model.compact import CompactGraph, Indices, Numbers
from lowtide.solve.model.compiled import inner, kernel
from lowtide.solve.model.splitmix import States, make_state
from lowtide.solve.search.profile import BLOCK, Profile, add_range, make_profile, settle

_JOURNAL = 4096

Triples = npt.NDArray[np.int32]

# Entries of ``Timeline.totals``.
RECOMPUTE_NS, RECOMPUTES, EDITS, PENDING, ASKED, CRAMPED, FRONT, BACK, LOW = range(9)


class Timeline(NamedTuple):
    """``slots[node, :computes[node]]`` are the slots of a node's computes, ascending; the first is its first compute."""

    node_at: Indices  # slot -> node, -1 where free
    slots: npt.NDArray[np.int32]
    computes: Indices
    recompute: Indices  # slots of all recomputes, in no order
    place: Indices  # slot -> its index in recompute
    profile: Profile
    totals: Numbers
    journal: Triples  # node, slot, sign of each edit of the present move
    asked: Triples  # node, slot, sign of the edits that a move asks for
    pending: npt.NDArray[np.int32]  # node, slot of recomputes that may have lost their last use
    rng: States


def make_timeline(t: CompactGraph, length: int, repeats: int, seed: int) -> Timeline:
    """Empty, for sequences of about ``length`` steps in which no node is computed more than ``repeats`` times."""
    size = -(-(16 * max(length, t.nodes + 1) + 512) // BLOCK) * BLOCK
    return Timeline(
        node_at=np.full(size, -1, np.int32),
        slots=np.zeros((t.nodes + 1, repeats), np.int32),
        computes=np.zeros(t.nodes + 1, np.int32),
        recompute=np.zeros(size, np.int32),
        place=np.zeros(size, np.int32),
        profile=make_profile(size),
        totals=np.zeros(9, np.int64),
        journal=np.zeros((_JOURNAL, 3), np.int32),
        asked=np.zeros((_JOURNAL, 3), np.int32),
        pending=np.zeros((_JOURNAL, 2), np.int32),
        rng=make_state(seed),
    )


@inner
def before(line: Timeline, node: int, slot: int) -> int:
    """The index of the node's last compute before the slot, -1 without one."""
    index = int(line.computes[node]) - 1
    while index >= 0 and line.slots[node, index] >= slot:
        index -= 1
    return index


@inner
def compute_after(line: Timeline, node: int, index: int) -> int:
    """The slot of the node's compute after the one with this index; the number of slots without one."""
    if index + 1 < line.computes[node]:
        return int(line.slots[node, index + 1])
    return len(line.node_at)


@inner
def last_use(t: CompactGraph, line: Timeline, storage: int, low: int, high: int) -> int:
    """The last slot strictly between that reads the storage, ``low`` without one."""
    latest = low
    for i in range(t.uses_start[storage], t.uses_start[storage + 1]):
        reader = t.uses[i]
        for index in range(line.computes[reader] - 1, -1, -1):
            slot = line.slots[reader, index]
            if slot < high:
                latest = max(latest, slot)
                break
    return latest


@inner
def next_use(t: CompactGraph, line: Timeline, node: int, low: int) -> int:
    """The first slot after ``low`` that reads something the node allocates; the number of slots without one."""
    earliest = len(line.node_at)
    for own in range(t.owns_start[node], t.owns_start[node + 1]):
        storage = t.owns[own]
        for i in range(t.uses_start[storage], t.uses_start[storage + 1]):
            reader = t.uses[i]
            for index in range(line.computes[reader]):
                slot = line.slots[reader, index]
                if slot > low:
                    earliest = min(earliest, slot)
                    break
    return earliest


@inner
def view_needed(t: CompactGraph, line: Timeline, view: int, low: int, high: int) -> bool:
    """Whether a step strictly between needs the view."""
    for i in range(t.needers_start[view], t.needers_start[view + 1]):
        reader = t.needers[i]
        for index in range(line.computes[reader] - 1, -1, -1):
            slot = line.slots[reader, index]
            if slot < high:
                if slot > low:
                    return True
                break
    return False


@inner
def reads(t: CompactGraph, node: int, storage: int) -> bool:
    found = False
    for i in range(t.reads_start[node], t.reads_start[node + 1]):
        found = found or t.reads[i] == storage
    return found


@inner
def end_with(t: CompactGraph, line: Timeline, storage: int, slot: int, node: int, at: int) -> int:
    """The end of the storage's life around the slot were the node computed at ``at`` too (node -1: as things are)."""
    base = t.storage_node[storage]
    index = before(line, base, slot)
    low, high = line.slots[base, index], compute_after(line, base, index)
    around = node >= 0 and low < at < high
    if around and base == node and slot < at:
        high = at
    end = last_use(t, line, storage, low, high)
    return max(end, at) if around and reads(t, node, storage) else end


@inner
def overwrites(t: CompactGraph, line: Timeline, reader: int, slot: int, node: int, at: int) -> bool:
    """Whether the reader's compute at the slot writes over what ends there, see ``end_with``."""
    for i in range(t.overs_start[reader], t.overs_start[reader + 1]):
        if end_with(t, line, t.overs[i], slot, node, at) == slot:
            return slot == line.slots[reader, 0] or not t.held[t.owns[t.owns_start[reader]]]
    return False


@inner
def overwrite(t: CompactGraph, line: Timeline, storage: int, end: int, node: int, slot: int, sign: int) -> None:
    """Bytes at the end of a life of the storage, which a compute of the node at the slot moves to there or away."""
    reader = line.node_at[end]
    for i in range(t.overs_start[reader], t.overs_start[reader + 1]):
        other = t.overs[i]
        ends = end_with(t, line, other, end, -1, -1) == end
        if ends == (end_with(t, line, other, end, node, slot) == end):
            continue
        was = overwrites(t, line, reader, end, -1, -1)
        if other == storage and was != overwrites(t, line, reader, end, node, slot):
            own = t.storage_bytes[t.owns[t.owns_start[reader]]]
            add_range(line.profile, end, end, sign * own if was else -sign * own)
        return  # of several whose ends move, the first stands for all


@inner
def change(t: CompactGraph, line: Timeline, node: int, slot: int, sign: int) -> None:
    """Add (or take back) what a recompute at the slot does to bytes and time, while it does not stand there."""
    profile, size = line.profile, len(line.node_at)
    time = t.time_ns[node]
    here = t.workspace_bytes[node]
    for i in range(t.reads_start[node], t.reads_start[node + 1]):
        storage = t.reads[i]
        if t.held[storage]:
            continue
        base = t.storage_node[storage]
        index = before(line, base, slot)
        end = last_use(t, line, storage, line.slots[base, index], compute_after(line, base, index))
        add_range(profile, end + 1, slot, sign * t.storage_bytes[storage])
        if end < slot and t.overwritten[storage]:
            overwrite(t, line, storage, end, node, slot, sign)
    for i in range(t.needs_start[node], t.needs_start[node + 1]):
        view = t.needs[i]
        storage = t.view_storage[view]
        base = t.storage_node[storage]
        index = 0 if t.held[storage] else before(line, base, slot)
        high = size if t.held[storage] else compute_after(line, base, index)
        if not view_needed(t, line, view, line.slots[base, index], high):
            time += t.view_time_ns[view]
    index = before(line, node, slot)
    low, high = line.slots[node, index], compute_after(line, node, index)
    for i in range(t.owns_start[node], t.owns_start[node + 1]):
        storage = t.owns[i]
        if t.held[storage] or last_use(t, line, storage, low, high) < slot:
            here += t.storage_bytes[storage]
            continue
        end = last_use(t, line, storage, low, slot)
        add_range(profile, end + 1, slot - 1, -sign * t.storage_bytes[storage])
        if t.overwritten[storage]:
            overwrite(t, line, storage, end, node, slot, sign)
        for j in range(t.views_start[storage], t.views_start[storage + 1]):
            view = t.views[j]
            if view_needed(t, line, view, low, slot) and view_needed(t, line, view, slot, high):
                time += t.view_time_ns[view]
    if t.random[node] and t.rng_state_bytes > 0:
        last = line.slots[node, line.computes[node] - 1]
        add_range(profile, last if line.computes[node] == 1 else last + 1, slot, sign * t.rng_state_bytes)
    if t.overs_start[node] < t.overs_start[node + 1] and overwrites(t, line, node, slot, node, slot):
        here -= t.storage_bytes[t.owns[t.owns_start[node]]]
    add_range(profile, slot, slot, sign * here)
    line.totals[RECOMPUTE_NS] += sign * time


@inner
def put(line: Timeline, node: int, slot: int) -> None:
    """Register a recompute."""
    index = line.computes[node]
    while line.slots[node, index - 1] > slot:
        line.slots[node, index] = line.slots[node, index - 1]
        index -= 1
    line.slots[node, index] = slot
    line.computes[node] += 1
    line.node_at[slot] = node
    line.recompute[line.totals[RECOMPUTES]] = slot
    line.place[slot] = line.totals[RECOMPUTES]
    line.totals[RECOMPUTES] += 1


@inner
def take(line: Timeline, node: int, slot: int) -> None:
    """Undo ``put``."""
    index = line.computes[node] - 1
    line.computes[node] -= 1
    moved = line.slots[node, index]
    while moved != slot:
        index -= 1
        line.slots[node, index], moved = moved, line.slots[node, index]
    line.node_at[slot] = -1
    line.totals[RECOMPUTES] -= 1
    last = line.recompute[line.totals[RECOMPUTES]]
    line.recompute[line.place[slot]] = last
    line.place[last] = line.place[slot]


@kernel
def codes_of(line: Timeline) -> Indices:
    """The encoded sequence."""
    steps = np.flatnonzero(line.node_at >= 0)
    codes = np.empty(len(steps), np.int32)
    for i in range(len(steps)):
        node = line.node_at[steps[i]]
        codes[i] = node if line.slots[node, 0] == steps[i] else ~node
    return codes


@kernel
def load(t: CompactGraph, line: Timeline, codes: Indices) -> None:
    """Spread an encoded sequence evenly over the slots and measure it from scratch."""
    size = len(line.node_at)
    line.node_at[:] = -1
    line.computes[:] = 0
    line.totals[:] = 0
    line.totals[FRONT] = -1
    for i in range(len(codes)):
        node = codes[i] if codes[i] >= 0 else ~codes[i]
        slot = (i + 1) * (size - 1) // len(codes)
        line.node_at[slot] = node
        line.slots[node, line.computes[node]] = slot
        line.computes[node] += 1
        if codes[i] < 0:
            line.recompute[line.totals[RECOMPUTES]] = slot
            line.place[slot] = line.totals[RECOMPUTES]
            line.totals[RECOMPUTES] += 1
            line.totals[RECOMPUTE_NS] += t.time_ns[node]
    measure(t, line)
    for view in range(len(t.view_time_ns)):
        line.totals[RECOMPUTE_NS] += t.view_time_ns[view] * lives_with(t, line, view)


@inner
def lives_with(t: CompactGraph, line: Timeline, view: int) -> int:
    """In how many lives of its storage a view is needed."""
    storage = t.view_storage[view]
    base = t.storage_node[storage]
    if t.held[storage]:
        return 1 if view_needed(t, line, view, line.slots[base, 0], len(line.node_at)) else 0
    lives = 0
    for index in range(line.computes[base]):
        if view_needed(t, line, view, line.slots[base, index], compute_after(line, base, index)):
            lives += 1
    return lives


@kernel
def measure(t: CompactGraph, line: Timeline) -> None:
    """Bytes over time from scratch."""
    bytes_at, size = line.profile.inner, len(line.node_at)
    bytes_at[:] = 0
    rises = np.zeros(size + 1, np.int64)
    for storage in range(len(t.storage_node)):
        base, held = t.storage_node[storage], t.held[storage]
        for index in range(line.computes[base]):
            first = line.slots[base, index]
            if held and index > 0:
                bytes_at[first] += t.storage_bytes[storage]
                continue
            last = size - 1 if held else last_use(t, line, storage, first, compute_after(line, base, index))
            rises[first] += t.storage_bytes[storage]
            rises[last + 1] -= t.storage_bytes[storage]
    for node in range(t.nodes + 1):
        for index in range(line.computes[node]):
            slot = line.slots[node, index]
            bytes_at[slot] += t.workspace_bytes[node]
            if overwrites(t, line, node, slot, -1, -1):
                bytes_at[slot] -= t.storage_bytes[t.owns[t.owns_start[node]]]
        if t.random[node] and line.computes[node] > 1:
            rises[line.slots[node, 0]] += t.rng_state_bytes
            rises[line.slots[node, line.computes[node] - 1] + 1] -= t.rng_state_bytes
    resident = 0
    for slot in range(size):
        resident += rises[slot]
        bytes_at[slot] += resident
    settle(line.profile)
