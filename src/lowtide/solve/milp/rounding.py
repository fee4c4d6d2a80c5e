"""From the storages kept at each stage to a sequence: Checkmate's second phase (arXiv 1910.02653, section 5).

Given what is stored when each stage begins, the least recomputation is determined: what a stage must hand on and what
its node reads is taken from what is stored, else recomputed, which asks for inputs in turn (the closed form of
algorithm 2). Stages are walked backwards; what cannot be recomputed is kept from where it was made, so that every
rounding gives a valid sequence. Linear in nodes x reads.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from lowtide.solve.milp.formulation import ONE, Formulation
from lowtide.solve.milp.linear import Floats
from lowtide.solve.model.compact import CompactGraph, Indices

_THRESHOLDS = tuple(step / 20 for step in range(1, 20))


def roundings(values: Floats, rounding: str, samples: int, seed: int) -> Iterator[Floats]:
    """The columns S rounded to 0 and 1: at 0.5, at a sweep of thresholds, or drawn with S* as probability."""
    if rounding == "randomised":
        draw = np.random.default_rng(seed)
        for _ in range(samples):
            yield (draw.random(len(values)) < values).astype(float)
    else:
        for threshold in (0.5,) if rounding == "deterministic" else _THRESHOLDS:
            yield (values > threshold).astype(float)


def completed(formulation: Formulation, model: CompactGraph, rounded: Floats) -> Indices:
    """The encoded sequence with the least recomputation for the storages that ``rounded`` keeps."""
    reach, kept = formulation.reach, set[int]()
    parts: list[list[int]] = [[model.nodes]]
    for index in range(len(formulation.stages) - 1, -1, -1):
        stage, stored = formulation.stages[index], formulation.stored[index]
        wanted = (kept - {*reach.owns[stage.target]}) | {*reach.reads[stage.target]}
        available = {s for s, column in stored.items() if column == ONE or (column >= 0 and rounded[column] > 0.5)}
        recomputed, kept = _recomputed(formulation, index, wanted, available)
        if stage.target < model.nodes:
            parts.append([stage.target])
        parts.append([~node for node in recomputed])
    return np.array([code for part in reversed(parts) for code in part], np.int32)


def _recomputed(
    formulation: Formulation, index: int, wanted: set[int], available: set[int]
) -> tuple[list[int], set[int]]:
    """Nodes to recompute in the stage, ascending, and the storages that it takes over from the stage before."""
    reach, stage = formulation.reach, formulation.stages[index]
    pending = [(-reach.base[storage], storage) for storage in wanted]
    heapq.heapify(pending)
    seen, recomputed, kept = set(wanted), set[int](), set[int]()
    while pending:
        storage = heapq.heappop(pending)[1]
        base = reach.base[storage]
        if storage in available or base not in stage.recompute:
            kept.add(storage)
        elif base not in recomputed:
            recomputed.add(base)
            for read in reach.reads[base]:
                if read not in seen:
                    seen.add(read)
                    heapq.heappush(pending, (-reach.base[read], read))
    return sorted(recomputed), kept
