"""One reverse sweep over a sequence of computes: its peak and time, unused recomputes dropped. Compiled.

A sequence says everything: a storage is live from each compute of its base to the last use before the next compute of
that base. Walking backwards, a read makes a storage live, a compute of its base ends that; a recompute that finds none
of its storages live is used by nobody and drops out. What a node reads last it may write over.

Sequences are encoded (first computes as the node, recomputes as its complement) and closed by the end node.
"""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.candidate import Candidate
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.compiled import kernel


@kernel
def sweep(t: CompactGraph, source: Indices) -> Candidate:
    """Peak (without ``fixed_bytes``) and time of an encoded sequence, its unused recomputes left out."""
    live = np.zeros(len(t.storage_node), np.uint8)
    need = np.zeros(len(t.view_time_ns), np.uint8)
    saved = np.zeros(t.nodes + 1, np.uint8)
    target = np.empty(len(source), np.int32)
    out = len(source)
    resident, peak, time = 0, 0, 0
    for position in range(len(source) - 1, -1, -1):
        code = source[position]
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
        target[out] = code
        for i in range(t.needs_start[node], t.needs_start[node + 1]):
            need[t.needs[i]] = 1
        over = False
        for i in range(t.overs_start[node], t.overs_start[node + 1]):
            if live[t.overs[i]] == 0 and not (again and t.held[t.owns[t.owns_start[node]]]):
                over = True
        for i in range(t.reads_start[node], t.reads_start[node + 1]):
            storage = t.reads[i]
            if live[storage] == 0:
                live[storage] = 1
                resident += t.storage_bytes[storage]
        step = resident + t.workspace_bytes[node]
        if over:
            step -= t.storage_bytes[t.owns[t.owns_start[node]]]
        for i in range(t.owns_start[node], t.owns_start[node + 1]):
            storage = t.owns[i]
            if live[storage] == 0 or (again and t.held[storage]):
                step += t.storage_bytes[storage]
                continue
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
    return Candidate(target[out:].copy(), time, peak)
