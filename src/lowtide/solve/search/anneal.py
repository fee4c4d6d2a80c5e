"""Simulated annealing over compute sequences, compiled: the engine of ``auto`` and of ``minimum_peak``.

Cost of a sequence, in nanoseconds: ``time_weight`` x recompute time + ``pressure`` x (largest excess over the budget +
the mean excess over steps x 4). The pressure (nanoseconds per byte) rises while the current sequence is over the
budget and falls while it fits, so that the search swings about the boundary of what is feasible, where good sequences
are.

With ``lower`` > 0 the budget follows the search down: whenever a sequence fits, the budget becomes its peak less that
fraction, and the run ends at ``target_bytes``. This minimises the peak. Without, it ends at ``target_ns``, which a lower
bound gives.

The number of iterations is fixed and all randomness comes from the seed: the same arguments give the same sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.model.candidate import Candidate
from lowtide.solve.model.classes import Classes
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.compiled import kernel
from lowtide.solve.model.splitmix import random_below
from lowtide.solve.search.moves import next_move
from lowtide.solve.search.profile import excess_of, peak_of
from lowtide.solve.search.timeline import CRAMPED, RECOMPUTE_NS, Timeline, codes_of, load, make_timeline

_COINS = 3


class AnnealSettings(NamedTuple):
    """The options of one run. Temperatures are nanoseconds; ``pressure`` is nanoseconds per byte at the start."""

    budget_bytes: int
    iterations: int
    hot: float
    cold: float
    pressure: float
    time_weight: float = 1.0
    lower: float = 0.0
    target_bytes: int = 0
    target_ns: int = -1
    rate: float = 1.05


@kernel
def anneal(t: CompactGraph, classes: Classes, line: Timeline, first: Indices, settings: AnnealSettings) -> Candidate:
    """The quickest sequence within the budget that was met (the lowest, with ``lower``), from ``first`` on.

    Its ``codes`` are empty where no sequence within the (last) budget was met.
    """
    budget, pressure, weight = settings.budget_bytes, settings.pressure, settings.time_weight
    load(t, line, first)
    share = 4.0 / len(line.profile.top)
    largest, total = excess_of(line.profile, budget)
    now_ns = line.totals[RECOMPUTE_NS]  # of the current sequence; the timeline may hold a rejected one
    cost = weight * now_ns + pressure * (largest + share * total)
    best, best_time, best_peak = first[:0].copy(), 0, 0
    fresh, accepted = True, True
    cramped = max(8, t.nodes >> 8)  # spreading the steps anew takes time in proportion to their number
    low, high = settings.pressure / 100.0, settings.pressure * 100.0
    temperature = settings.hot
    cooling = (settings.cold / settings.hot) ** (1.0 / max(settings.iterations // 64, 1))
    for iteration in range(settings.iterations):
        if fresh and largest == 0:
            peak = peak_of(line.profile)
            better = peak < best_peak if settings.lower > 0 else now_ns < best_time
            if len(best) == 0 or better:
                best, best_time, best_peak = codes_of(line), now_ns, peak
                met = now_ns <= settings.target_ns if settings.lower == 0 else peak <= settings.target_bytes
                if met:
                    break
                if settings.lower > 0:
                    budget = peak - max(1, int(peak * settings.lower))
                    largest, total = excess_of(line.profile, budget)
                    cost = weight * now_ns + pressure * (largest + share * total)
        fresh = False
        if iteration % 64 == 63:
            temperature *= cooling
            pressure = min(pressure * settings.rate, high) if largest > 0 else max(pressure / settings.rate, low)
            cost = weight * now_ns + pressure * (largest + share * total)
        moved = next_move(t, classes, line, not accepted, random_below(line.rng, _COINS) * 128)
        accepted = False
        if not moved:
            continue
        over, sum_over = excess_of(line.profile, budget)
        trial = weight * line.totals[RECOMPUTE_NS] + pressure * (over + share * sum_over)
        draw = (random_below(line.rng, 1 << 30) + 1) / float(1 << 30)
        accepted = trial <= cost - temperature * np.log(draw)
        if accepted:
            now_ns, largest, total, cost = line.totals[RECOMPUTE_NS], over, sum_over, trial
            fresh = True
            if line.totals[CRAMPED] > cramped:
                load(t, line, codes_of(line))
                largest, total = excess_of(line.profile, budget)
                cost = weight * now_ns + pressure * (largest + share * total)
    return Candidate(best, best_time, best_peak)


def search(t: CompactGraph, classes: Classes, first: Indices, settings: AnnealSettings, seed: int) -> Candidate:
    """``anneal`` with its own work space."""
    nodes = np.where(first < 0, ~first, first)
    repeats = int(np.bincount(nodes).max()) + 6
    return anneal(t, classes, make_timeline(t, len(first), repeats, seed), first, settings)
