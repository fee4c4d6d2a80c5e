"""What the block programs run most: one block's backward sequence, its measures, and a line of ever smaller saved sets.

A block owns the forward nodes ``low .. high - 1`` and the backward nodes ``first .. last - 1``. An option of it is a
list of codes: its backward nodes in order with recomputes ``~x`` of its forward nodes between them. What the option
saves from the forward pass follows: whatever the codes read before they recompute it. Bytes here count the storages of
the block's own forward nodes; what else is there is in ``before`` and ``during`` (see ``lowtide.solve.blocks.chain``).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.solve.model.compact import CompactGraph, Flags, Indices, Numbers
from lowtide.solve.model.compiled import inner, kernel


class BlockSpan(NamedTuple):
    """A block: its nodes, the storages that count, those that later blocks read, those that later regions read."""

    low: int
    high: int
    first: int
    last: int
    counted: Flags  # storage
    leaves: Flags  # storage: read by a later block's forward or backward nodes
    late: Flags  # storage: read by a backward node after ``last``
    before: Numbers  # node -> bytes of other storages right before it, in the backward pass
    during: Numbers  # node -> the same while it runs, its results and workspace included


class Measures(NamedTuple):
    """``saved_bytes`` includes what leaves the block; ``rerun_ns`` is the part of the forward that the option needs
    when nothing is to leave, ``extra_ns`` the recomputes among its codes."""

    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    rerun_ns: int
    extra_ns: int


@kernel
def measure_option(t: CompactGraph, span: BlockSpan, codes: Indices) -> Measures:
    """Walks the codes, then the block's forward nodes, backwards."""
    live = np.zeros(len(t.storage_node), np.bool_)
    late = _revive(t, span, span.late, live)
    resident, backward_peak, extra = _walk_codes(t, span, codes, live, late)
    rerun = _rerun_ns(t, span, live.copy())
    saved = resident + _revive(t, span, span.leaves, live)
    return Measures(saved, _walk_forward(t, span, live, saved), backward_peak, rerun, extra)


@inner
def _revive(t: CompactGraph, span: BlockSpan, chosen: Flags, live: Flags) -> int:
    """Make the block's chosen storages live; the bytes that this adds."""
    added = 0
    for index in range(t.owns_start[span.low], t.owns_start[span.high]):
        storage = t.owns[index]
        if span.counted[storage] and chosen[storage] and not live[storage]:
            live[storage] = True
            added += t.storage_bytes[storage]
    return added


@inner
def _walk_codes(t: CompactGraph, span: BlockSpan, codes: Indices, live: Flags, resident: int) -> tuple[int, int, int]:
    """Bytes live before the codes, their peak, and the time of the recomputes among them that are used."""
    peak, extra, following = 0, 0, span.last
    for position in range(len(codes) - 1, -1, -1):
        code = codes[position]
        node = code if code >= 0 else ~code
        if code < 0:
            used = False
            for index in range(t.owns_start[node], t.owns_start[node + 1]):
                used = used or live[t.owns[index]]
            if not used:
                continue
            extra += t.time_ns[node]
        for index in range(t.reads_start[node], t.reads_start[node + 1]):
            storage = t.reads[index]
            owner = t.storage_node[storage]
            if span.low <= owner < span.high and span.counted[storage] and not live[storage]:
                live[storage] = True
                resident += t.storage_bytes[storage]
        if code >= 0:
            peak = max(peak, resident + span.during[node])
            following = node
            continue
        step = resident + t.workspace_bytes[node] + span.before[following]
        for index in range(t.owns_start[node], t.owns_start[node + 1]):
            storage = t.owns[index]
            if live[storage]:
                live[storage] = False
                resident -= t.storage_bytes[storage]
            else:
                step += t.storage_bytes[storage]
        peak = max(peak, step)
    return resident, peak, extra


@inner
def _walk_forward(t: CompactGraph, span: BlockSpan, live: Flags, resident: int) -> int:
    """The peak of the block's forward nodes."""
    peak = resident
    for node in range(span.high - 1, span.low - 1, -1):
        for index in range(t.reads_start[node], t.reads_start[node + 1]):
            storage = t.reads[index]
            if span.low <= t.storage_node[storage] < node and span.counted[storage] and not live[storage]:
                live[storage] = True
                resident += t.storage_bytes[storage]
        step = resident + t.workspace_bytes[node]
        for index in range(t.owns_start[node], t.owns_start[node + 1]):
            storage = t.owns[index]
            if live[storage]:
                live[storage] = False
                resident -= t.storage_bytes[storage]
            elif span.counted[storage]:
                step += t.storage_bytes[storage]
        peak = max(peak, step)
    return peak


@kernel
def _rerun_ns(t: CompactGraph, span: BlockSpan, wanted: Flags) -> int:
    """Time of the block's forward nodes that are needed for the storages in ``wanted``, which is used up."""
    time = 0
    for node in range(span.high - 1, span.low - 1, -1):
        used = False
        for index in range(t.owns_start[node], t.owns_start[node + 1]):
            used = used or wanted[t.owns[index]]
        if used and t.recomputable[node]:
            time += t.time_ns[node]
            for index in range(t.reads_start[node], t.reads_start[node + 1]):
                storage = t.reads[index]
                if span.low <= t.storage_node[storage] < node and span.counted[storage]:
                    wanted[storage] = True
    return time


@kernel
def _with_room(codes: Indices, size: int) -> Indices:
    """The codes with room for another at position ``size``."""
    if size < len(codes):
        return codes
    grown = np.empty(len(codes) * 2, np.int32)
    grown[:size] = codes
    return grown


@kernel
def lazy_codes(t: CompactGraph, span: BlockSpan, kept: Flags, retain: bool) -> Indices:
    """The block's backward nodes, each preceded by recomputes of what it reads and nobody has.

    ``kept`` (by node) tells whose results are there from the forward pass. With ``retain`` everything recomputed stays
    for later readers, else only what the backward node itself reads does.
    """
    have = kept.copy()
    codes = np.empty((span.last - span.first) * 2 + 16, np.int32)
    size = 0
    wanted = np.zeros(t.nodes + 1, np.bool_)
    for node in range(span.first, span.last):
        top = -1
        for index in range(t.reads_start[node], t.reads_start[node + 1]):
            owner = t.storage_node[t.reads[index]]
            if span.low <= owner < span.high and span.counted[t.reads[index]] and not have[owner]:
                wanted[owner] = True
                top = max(top, owner)
        direct = wanted.copy() if top >= 0 and not retain else wanted
        for owner in range(top, span.low - 1, -1):
            if wanted[owner]:
                for index in range(t.reads_start[owner], t.reads_start[owner + 1]):
                    source = t.storage_node[t.reads[index]]
                    if span.low <= source < span.high and span.counted[t.reads[index]] and not have[source]:
                        wanted[source] = True
        for owner in range(span.low, top + 1):
            if wanted[owner]:
                codes = _with_room(codes, size)
                codes[size] = ~owner
                size += 1
                have[owner] = retain or direct[owner]
        wanted[span.low : top + 1] = False
        codes = _with_room(codes, size)
        codes[size] = node
        size += 1
    return codes[:size].copy()


@kernel
def shrinking_sets(t: CompactGraph, span: BlockSpan, weight: float) -> npt.NDArray[np.bool_]:
    """Rows of kept flags (by node): all, then without the node whose loss costs least time per byte saved, and so on.

    Bytes saved count ``weight`` times the backward peak on top. Quadratic in the block's nodes, times its codes.
    """
    kept = np.zeros(t.nodes + 1, np.bool_)
    for node in range(span.low, span.high):
        kept[node] = t.recomputable[node]
    reading = np.zeros(t.nodes + 1, np.bool_)
    for node in range(span.first, span.last):
        for index in range(t.reads_start[node], t.reads_start[node + 1]):
            reading[t.storage_node[t.reads[index]]] = True
    rows = np.zeros((span.high - span.low + 2, t.nodes + 1), np.bool_)
    rows[0] = kept
    count = 1
    current = measure_option(t, span, lazy_codes(t, span, kept, True))
    while True:
        best, best_rank, best_score, best_gain = -1, 0, 0.0, 0.0
        for node in range(span.low, span.high):
            if not kept[node]:
                continue
            kept[node] = False
            found = measure_option(t, span, lazy_codes(t, span, kept, True))
            kept[node] = True
            time = float(found.extra_ns - current.extra_ns)
            peak_gain = float(current.backward_peak_bytes - found.backward_peak_bytes)
            gain = float(current.saved_bytes - found.saved_bytes) + weight * peak_gain
            rank, score = (1, time / gain) if gain > 0 else (2, time)
            if not reading[node] and gain == 0 and time == 0:
                rank = 0  # only the block's own forward nodes read it: kept for nobody
            better = rank < best_rank or (rank == best_rank and score < best_score)
            if best < 0 or better or (rank == best_rank and score == best_score and gain > best_gain):
                best, best_rank, best_score, best_gain = node, rank, score, gain
        if best < 0:
            return rows[:count]
        kept[best] = False
        current = measure_option(t, span, lazy_codes(t, span, kept, True))
        rows[count] = kept
        count += 1
