"""Nested segment checkpointing: a family of starting points for the searches, good for small budgets.

The forward pass is cut into ``m`` blocks of about equal time, each cut moved to where the fewest bytes cross it. A
block is recomputed just before its first backward use, from the nearest block input that is still live. The kept inputs are
the optimal nested choice for ``s`` slots on a chain with these block times (the recurrence of Griewank and Walther 2000
with unequal times). With s = m - 1 every block is recomputed once (Chen et al. 2016, arXiv 1604.06174).
All (m, s) of a small grid are generated and swept; bytes are ignored until then, so nothing is guaranteed.

    E(l, h, s) = min over l < c < h of  E(c, h, s - 1) + F(l, c) + E(l, c, s)        recompute time of blocks l .. h-1
    E(l, h, 0) = sum over i < h - 1 of F(l, i + 1),   E(l, l + 1, s) = 0             F(l, c): forward time of blocks l .. c-1
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices, Numbers
from lowtide.solve.model.structure import even_cuts, last_forward_use

_BLOCKS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48)
_SLOTS = (1, 2, 3, 4, 5, 6, 8)


def segment_sequences(model: CompactGraph) -> Iterator[Indices]:
    """Yield encoded sequences, one per number of blocks and slots."""
    for blocks in _BLOCKS:
        if blocks >= model.boundary:
            return
        cuts = even_cuts(model, blocks, least_ns=0)
        if len(cuts) != blocks + 1:
            continue
        times = np.array([model.time_ns[a:b].sum() for a, b in zip(cuts[:-1], cuts[1:], strict=True)], np.int64)
        stages = _recompute_at(model, cuts)
        for slots in sorted({*(s for s in _SLOTS if s < blocks - 1), blocks - 1}):
            yield _sequence(model, cuts, stages, _advance_from(times, slots))


def _recompute_at(model: CompactGraph, cuts: list[int]) -> list[int]:
    """Return for every block the backward node before which it is recomputed; not increasing with the block."""
    last = last_forward_use(model)
    first_use = np.full(len(model.storage_node), model.nodes, np.int64)
    backward = slice(model.reads_start[model.boundary], model.reads_start[model.nodes])
    np.minimum.at(first_use, model.reads[backward], model.read_node[backward])
    stages = [model.nodes] * (len(cuts) - 1)
    for block, (begin, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        inside = (model.storage_node >= begin) & (model.storage_node < end) & (last < end)
        if inside.any():
            stages[block] = int(first_use[inside].min())
    for block in range(len(stages) - 2, -1, -1):
        stages[block] = max(stages[block], stages[block + 1])
    return stages


def _advance_from(times: Numbers, slots: int) -> list[int]:
    """Return for every block the block from which its recomputation starts; -1: kept from the forward pass."""
    split = core.best_splits(times, slots)
    starts = [-1] * len(times)
    waiting = [(0, len(times), slots, -1)]
    while waiting:
        low, high, left, start = waiting.pop()
        if high - low == 1 or left == 0:
            starts[low : high - 1] = [low] * (high - 1 - low)
            starts[high - 1] = start
            continue
        middle = int(split[low, high, left])
        waiting.append((middle, high, left - 1, start))
        waiting.append((low, middle, left, low))
    return starts


def _sequence(model: CompactGraph, cuts: list[int], stages: list[int], starts: list[int]) -> Indices:
    recomputes: dict[int, list[int]] = {}
    for block in range(len(starts) - 1, -1, -1):
        if starts[block] >= 0 and stages[block] < model.nodes:
            nodes = range(cuts[starts[block]], cuts[block + 1])
            recomputes.setdefault(stages[block], []).extend(~node for node in nodes if model.recomputable[node])
    codes: list[int] = []
    for node in range(model.nodes + 1):
        codes.extend(recomputes.get(node, ()))
        codes.append(node)
    return np.array(codes, np.int32)
