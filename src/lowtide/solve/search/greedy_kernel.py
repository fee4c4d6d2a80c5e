"""Greedy eviction over a compact model, compiled. See ``lowtide.solve.greedy``."""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Indices, Numbers
from lowtide.solve.model.compiled import inner, kernel


@kernel
def next_use(t: CompactGraph, storage: int, node: int) -> int:
    """The first node after ``node`` that reads the storage in the program as written, -1 without one."""
    low, high = t.uses_start[storage], t.uses_start[storage + 1]
    while low < high:
        middle = (low + high) // 2
        if t.uses[middle] > node:
            high = middle
        else:
            low = middle + 1
    return t.uses[low] if low < t.uses_start[storage + 1] else -1


@kernel
def rebuild_ns(t: CompactGraph, live: Indices, node: int, seen: Indices, stamp: int, stack: Indices) -> int:
    """Time to compute the node again, with whatever it reads and is gone; the walk ends after 64 nodes."""
    total, depth, walked = 0, 1, 0
    stack[0] = node
    seen[node] = stamp
    while depth > 0 and walked < 64:
        depth -= 1
        walked += 1
        here = stack[depth]
        total += t.time_ns[here]
        for i in range(t.reads_start[here], t.reads_start[here + 1]):
            storage = t.reads[i]
            base = t.storage_node[storage]
            if live[storage] == 0 and seen[base] != stamp:
                seen[base] = stamp
                stack[depth] = base
                depth += 1
    return total


@kernel
def choose_victim(
    t: CompactGraph,
    live: Indices,
    pins: Indices,
    at: int,
    elapsed: Numbers,
    seen: Indices,
    stamps: Indices,
    stack: Indices,
) -> int:
    """The live storage that is cheapest to rebuild per byte and time until its next use, -1 without one."""
    best, best_score = -1, np.inf
    for storage in range(len(live)):
        base = t.storage_node[storage]
        if live[storage] == 0 or pins[storage] > 0 or t.storage_bytes[storage] == 0 or not t.recomputable[base]:
            continue
        if t.held[storage]:
            continue
        use = next_use(t, storage, at)
        if use < 0:
            return storage
        stamps[0] += 1
        wait = elapsed[use] - elapsed[at] + 1
        score = rebuild_ns(t, live, base, seen, stamps[0], stack) / (float(t.storage_bytes[storage]) * wait)
        if score < best_score:
            best, best_score = storage, score
    return best


@kernel
def overwritten(t: CompactGraph, pins: Indices, node: int, at: int) -> int:
    """The storage that the node writes over because nothing reads it from ``at`` on, -1 without one."""
    for i in range(t.overs_start[node], t.overs_start[node + 1]):
        storage: int = t.overs[i]
        if pins[storage] == 1 and next_use(t, storage, at) < 0 and t.recomputable[t.storage_node[storage]]:
            return storage
    return -1


@kernel
def dropped(t: CompactGraph, live: Indices, storage: int, node: int) -> int:
    """Let go of a storage that nothing after ``node`` reads; its bytes, 0 where it stays."""
    if live[storage] == 0 or t.held[storage] or not t.recomputable[t.storage_node[storage]]:
        return 0
    if next_use(t, storage, node) >= 0:
        return 0
    live[storage] = 0
    return int(t.storage_bytes[storage])


@inner
def pin_inputs(t: CompactGraph, pins: Indices, node: int, change: int) -> None:
    """Keep what the node reads from being evicted, or (with -1) no longer."""
    for i in range(t.reads_start[node], t.reads_start[node + 1]):
        pins[t.reads[i]] += change


@inner
def missing_input(t: CompactGraph, live: Indices, node: int) -> int:
    """The latest of the nodes whose results the node reads and nobody has, -1 without one."""
    missing = -1
    for i in range(t.reads_start[node], t.reads_start[node + 1]):
        if live[t.reads[i]] == 0:
            missing = max(missing, t.storage_node[t.reads[i]])
    return missing


@inner
def fresh_bytes(t: CompactGraph, live: Indices, node: int) -> int:
    """Bytes of the storages that the node allocates and that are not there."""
    total = 0
    for i in range(t.owns_start[node], t.owns_start[node + 1]):
        if live[t.owns[i]] == 0:
            total += t.storage_bytes[t.owns[i]]
    return total


@kernel
def greedy_sequence(t: CompactGraph, budget: int, capacity: int) -> Indices:
    """An encoded sequence that evicts whenever the next compute would exceed the budget; it may still exceed it.

    Empty where more than ``capacity`` steps would be needed.
    """
    storages = len(t.storage_node)
    live = np.zeros(storages, np.int32)
    pins = np.zeros(storages, np.int32)
    seen = np.zeros(t.nodes + 1, np.int32)
    stamps = np.zeros(1, np.int32)
    walk = np.zeros(t.nodes + 1, np.int32)
    stack = np.zeros(t.nodes + 1, np.int32)
    elapsed = np.zeros(t.nodes + 2, np.int64)
    for node in range(t.nodes + 1):
        elapsed[node + 1] = elapsed[node] + t.time_ns[node]
    out = np.zeros(capacity, np.int32)
    length, resident = 0, 0
    for node in range(t.nodes + 1):
        depth, begun = 1, length
        stack[0] = node
        pin_inputs(t, pins, node, 1)
        while depth > 0:
            top = stack[depth - 1]
            missing = missing_input(t, live, top)
            if missing >= 0:
                stack[depth] = missing
                depth += 1
                pin_inputs(t, pins, missing, 1)
                continue
            need = t.workspace_bytes[top] + fresh_bytes(t, live, top)
            over = overwritten(t, pins, top, node)
            if over >= 0:
                need -= t.storage_bytes[over]
            while resident + need > budget:
                victim = choose_victim(t, live, pins, node, elapsed, seen, stamps, walk)
                if victim < 0:
                    break
                live[victim] = 0
                resident -= t.storage_bytes[victim]
            if length == capacity:
                return out[:0]
            out[length] = node if depth == 1 else ~top
            length += 1
            resident += fresh_bytes(t, live, top)
            live[t.owns[t.owns_start[top] : t.owns_start[top + 1]]] = 1
            if over >= 0:
                live[over] = 0
                resident -= t.storage_bytes[over]
            pin_inputs(t, pins, top, -1)
            depth -= 1
        for i in range(t.reads_start[node], t.reads_start[node + 1]):
            resident -= dropped(t, live, t.reads[i], node)
        for position in range(begun, length):
            made = out[position] if out[position] >= 0 else ~out[position]
            for i in range(t.owns_start[made], t.owns_start[made + 1]):
                resident -= dropped(t, live, t.owns[i], node)
    return out[:length]
