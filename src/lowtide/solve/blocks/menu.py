"""Menus: the options of a block, from everything saved to nothing, and blocks that are the same found once.

A menu is a line of saved sets, each without one more node than the one before, the node chosen that costs least
recompute time per byte; twice, with the backward peak counted and without, and each set with its recomputed results
kept for later readers and not. Of these the Pareto-best in (saved bytes, peaks, time) stay, thinned to ``count``.

Two blocks are the same where nodes, reads, flags and bytes agree up to renaming: storages of the block and of its
region by position, all others by order of first reading. Their times are added up before the menu is made: only
proportions matter, and sums stay exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.native import core
from lowtide.solve.blocks.chain import BlockSpan, Chain, Measures, measure_options
from lowtide.solve.model.compact import Indices, Numbers

Menu = tuple[Indices, ...]
"""Options of a block, each a list of codes."""
Signature = tuple[object, ...]


def everything(chain: Chain, low: int, high: int) -> Indices:
    """The option that saves all and recomputes nothing."""
    first, last = chain.region(low, high)
    return np.arange(first, last, dtype=np.int32)


def menus(chain: Chain, count: int) -> list[Menu]:
    """One menu of about ``count`` options per block; equal blocks are solved once, with the sum of their times."""
    found: list[Menu] = [()] * chain.blocks
    for alike in equal_blocks(chain):
        spans = [chain.span(block, block + 1) for block in alike]
        options = leaf_menu(chain, spans, count)
        for block, span in zip(alike, spans, strict=True):
            found[block] = tuple(moved(spans[0], span, codes) for codes in options)
    return found


def equal_blocks(chain: Chain) -> list[list[int]]:
    """Blocks grouped by structure, in order of first appearance."""
    groups: dict[Signature, list[int]] = {}
    for block in range(chain.blocks):
        groups.setdefault(signature(chain, block, block + 1), []).append(block)
    return list(groups.values())


def signature(chain: Chain, low: int, high: int) -> Signature:
    """Equal for parts of the chain with equal structure and bytes, times apart."""
    model, span = chain.model, chain.span(low, high)
    outside: dict[int, int] = {}
    rows: list[object] = []
    for begin, end, origin in ((span.low, span.high, 0), (span.first, span.last, 1)):
        for node in range(begin, end):
            reads = []
            for storage in model.reads_of(node).tolist():
                owner = int(model.storage_node[storage])
                position = storage - int(model.owns[model.owns_start[owner]])
                if span.low <= owner < span.high:
                    reads.append((0, owner - span.low, position))
                elif span.first <= owner < span.last:
                    reads.append((1, owner - span.first, position))
                else:
                    reads.append((2, outside.setdefault(storage, len(outside)), int(model.storage_bytes[storage])))
            owned = tuple(
                (int(model.storage_bytes[s]), bool(span.counted[s]), bool(span.leaves[s]), bool(span.late[s]))
                for s in model.owns_of(node)
            )
            flags = (bool(model.recomputable[node]), bool(model.random[node]), int(model.workspace_bytes[node]))
            rows.append((origin, tuple(sorted(reads)), owned, flags))
    return tuple(rows)


def moved(source: BlockSpan, target: BlockSpan, codes: Indices) -> Indices:
    """Codes of one part of the chain as codes of an equal one."""
    recomputed, run = codes - (target.low - source.low), codes + (target.first - source.first)
    return np.where(codes < 0, recomputed, run).astype(np.int32)


def leaf_menu(chain: Chain, alike: Sequence[BlockSpan], count: int) -> Menu:
    """Options of the first of some equal parts, by the saved sets of the module docstring."""
    span, model = alike[0], chain.model
    if len(alike) > 1:
        time = model.time_ns.copy()
        time[span.low : span.high] = np.sum([time[o.low : o.high] for o in alike], axis=0)
        time[span.first : span.last] = np.sum([time[o.first : o.last] for o in alike], axis=0)
        model = model._replace(time_ns=time)
    options = [np.arange(span.first, span.last, dtype=np.int32)]
    for weight in (0.0, 1.0):
        for kept in core.shrinking_sets(model, span, weight):
            options += [core.lazy_codes(model, span, kept, retain) for retain in (True, False)]
    return thinned(measure_options(model, span, options), options, count)


def thinned(measures: Measures, options: Sequence[Indices], count: int) -> Menu:
    """The Pareto-best options, about ``count`` of them, evenly spread over saved bytes, quickest and smallest kept."""
    saved, forward_peak, backward_peak, _, extra_ns = measures
    order = np.lexsort((backward_peak, saved, extra_ns))
    figures = np.stack([extra_ns, saved, backward_peak, forward_peak], axis=1)[order]
    best = core.undominated(figures.reshape(-1), figures.shape[1])
    kept = range(len(best)) if len(best) <= count else _spread(figures[best], count)
    return tuple(options[order[best[index]]] for index in kept)


def _spread(figures: Numbers, count: int) -> list[int]:
    """Rows of ``thinned``'s figures: the first, the smallest, and the quickest within sizes evenly spread."""
    saved, peaks = figures[:, 1], figures[:, 2]
    kept = {0, int(np.argmin(saved)), int(np.argmin(peaks))}
    for sizes, goals in ((saved, count - len(kept)), (peaks, count // 3)):
        for goal in np.linspace(sizes.min(), sizes.max(), max(goals, 0)):
            kept.add(int(np.flatnonzero(sizes <= goal)[0]))
    return sorted(kept)
