"""One reverse sweep over a sequence of computes: its peak and time, edits applied on the way. Compiled.

A sequence says everything: a storage is live from each compute of its base to the last use before the next compute of
that base. Walking backwards, a read makes a storage live, a compute of its base ends that; a recompute that finds none
of its storages live is used by nobody and drops out. Any insertion of a recompute after the node's first compute gives
another valid sequence, and so does any removal of a recompute.

Sequences are encoded (first computes as the node, recomputes as its complement) and stored at the right end of a
buffer, from ``start`` on, closed by the end node. Edits are insertions (of a recompute before a position, positions
descending) and removals (a mark at a position). With an insertion come, by the toss of a coin, recomputes of what it
reads and nobody needs afterwards: the lazy closure.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.solve.compact import Indices
from lowtide.solve.compiled import kernel
from lowtide.solve.tables import Tables

Bytes = npt.NDArray[np.uint8]
States = npt.NDArray[np.uint64]


class Scratch(NamedTuple):
    """Work space of a sweep, allocated once per search."""

    live: Bytes  # storage
    need: Bytes  # view
    saved: Bytes  # node: its generator state is kept
    pending: Indices
    removed: Bytes  # position -> to be removed; cleared by the sweep
    insert_at: Indices
    insert_node: Indices
    rng: States


class Swept(NamedTuple):
    """What a sweep found. ``recompute_ns`` counts recomputes and all views; ``start`` is -1 where it was cut short."""

    start: int
    recompute_ns: int
    peak_bytes: int
    excess_max: int
    excess_sum: int


def make_scratch(t: Tables, capacity: int, seed: int) -> Scratch:
    return Scratch(
        live=np.zeros(len(t.storage_node), np.uint8),
        need=np.zeros(len(t.view_time_ns), np.uint8),
        saved=np.zeros(t.nodes + 1, np.uint8),
        pending=np.zeros(len(t.reads) + 1024, np.int32),
        removed=np.zeros(capacity + 1, np.uint8),
        insert_at=np.zeros(1024, np.int32),
        insert_node=np.zeros(1024, np.int32),
        rng=np.random.default_rng(seed).integers(0, 2**63, 1, np.uint64),
    )


@kernel
def random_below(rng: States, bound: int) -> int:
    """A number in ``range(bound)`` from a splitmix64 generator."""
    rng[0] += np.uint64(0x9E3779B97F4A7C15)
    z = rng[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return int((z >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32))


@kernel
def sweep(
    t: Tables,
    scratch: Scratch,
    source: Indices,
    source_start: int,
    target: Indices,
    insertions: int,
    coin: int,
    budget: int,
    limit: float,
    max_weight: float,
    sum_weight: float,
    time_weight: float,
) -> Swept:
    """Copy ``source`` to ``target`` with the edits in ``scratch`` and say what it costs.

    Cut short as soon as ``time_weight * recompute_ns + max_weight * excess_max + sum_weight * excess_sum`` is above
    ``limit`` (excess: bytes above the budget, the largest and the sum over steps). ``coin`` of 256 is the chance of a
    closure recompute.
    """
    live, need, saved, pending = scratch.live, scratch.need, scratch.saved, scratch.pending
    live[:] = 0
    need[:] = 0
    saved[:] = 0
    capacity = len(source)
    out = capacity
    position = capacity - 1
    inserted, waiting = 0, 0
    resident, peak, excess_max, excess_sum, time = 0, 0, 0, 0, 0
    aborted = False
    while True:
        closing = False
        if waiting > 0:
            pick = 0
            for i in range(1, waiting):
                if pending[i] > pending[pick]:
                    pick = i
            code = ~pending[pick]
            waiting -= 1
            pending[pick] = pending[waiting]
            closing = True
        elif inserted < insertions and scratch.insert_at[inserted] == position + 1:
            code = ~scratch.insert_node[inserted]
            inserted += 1
            closing = True
        elif position >= source_start:
            code = source[position]
            position -= 1
            if scratch.removed[position + 1] == 1:
                scratch.removed[position + 1] = 0
                if code < 0:
                    continue
        else:
            break
        node = code if code >= 0 else ~code
        again = code < 0
        if again:
            used = False
            for i in range(t.owns_start[node], t.owns_start[node + 1]):
                storage = t.owns[i]
                if live[storage] == 1 and not t.held[storage]:
                    used = True
            if not used:
                continue
            time += t.time_ns[node]
            if t.random[node] and saved[node] == 0:
                saved[node] = 1
                resident += t.rng_state_bytes
        out -= 1
        if out < 0:
            aborted = True
            break
        target[out] = code
        for i in range(t.needs_start[node], t.needs_start[node + 1]):
            need[t.needs[i]] = 1
        for i in range(t.reads_start[node], t.reads_start[node + 1]):
            storage = t.reads[i]
            if live[storage] == 0:
                live[storage] = 1
                resident += t.storage_bytes[storage]
                if closing and coin > 0 and random_below(scratch.rng, 256) < coin:
                    base = t.storage_node[storage]
                    if t.recomputable[base] and not t.held[storage]:
                        pending[waiting] = base
                        waiting += 1
        step = resident + t.workspace_bytes[node]
        for i in range(t.owns_start[node], t.owns_start[node + 1]):
            storage = t.owns[i]
            if live[storage] == 0 or (again and t.held[storage]):
                step += t.storage_bytes[storage]
            else:
                live[storage] = 0
                resident -= t.storage_bytes[storage]
                for j in range(t.views_start[storage], t.views_start[storage + 1]):
                    view = t.views[j]
                    if need[view] == 1:
                        need[view] = 0
                        time += t.view_time_ns[view]
        if not again and saved[node] == 1:
            saved[node] = 0
            resident -= t.rng_state_bytes
        peak = max(peak, step)
        if step > budget:
            excess_max = max(excess_max, step - budget)
            excess_sum += step - budget
        if time_weight * time + max_weight * excess_max + sum_weight * excess_sum > limit:
            aborted = True
            break
    if aborted:
        scratch.removed[source_start : position + 1] = 0
    return Swept(-1 if aborted else out, time, peak, excess_max, excess_sum)
