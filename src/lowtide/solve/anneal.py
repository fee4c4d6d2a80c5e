"""Simulated annealing over compute sequences, compiled: the engine of ``auto`` and of ``minimum_peak``.

Cost of a sequence, in nanoseconds: ``time_weight`` x recompute time + ``pressure`` x (largest excess over the budget +
the mean excess over steps x 4). The pressure (nanoseconds per byte) rises while the current sequence is over the
budget and falls while it fits, so that the search swings about the boundary of what is feasible, where good sequences
are.

With ``lower`` > 0 the budget follows the search down: whenever a sequence fits, the budget becomes its peak less that
fraction, and the run ends at ``target_bytes``. This minimises the peak.

The number of iterations is fixed and all randomness comes from the seed: the same arguments give the same sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.compact import Indices
from lowtide.solve.compiled import kernel
from lowtide.solve.moves import (
    insert_before_use,
    insert_in_group,
    remove_in_group,
    remove_one,
    remove_run,
    shift,
    step_down,
    swap,
)
from lowtide.solve.sweep import Scratch, Swept, make_scratch, random_below, sweep
from lowtide.solve.tables import Tables

_COINS = 3


class Settings(NamedTuple):
    """Of one run. Temperatures are nanoseconds; ``pressure`` is nanoseconds per byte at the start."""

    budget_bytes: int
    iterations: int
    hot: float
    cold: float
    pressure: float
    time_weight: float = 1.0
    lower: float = 0.0
    target_bytes: int = 0
    rate: float = 1.05


class Found(NamedTuple):
    """``codes`` is empty where no sequence within the (last) budget was met."""

    codes: Indices
    recompute_ns: int
    peak_bytes: int
    pressure: float


@kernel
def propose(t: Tables, classes: Indices, scratch: Scratch, codes: Indices, start: int) -> int:
    """One random move; how many insertions it lists, -1 for none."""
    draw = random_below(scratch.rng, 100)
    if draw < 34:
        return insert_before_use(t, scratch, codes, start)
    if draw < 52:
        return remove_one(scratch, codes, start)
    if draw < 57:
        return remove_run(scratch, codes, start)
    if draw < 72:
        return shift(t, scratch, codes, start)
    if draw < 84:
        return swap(t, scratch, codes, start)
    if draw < 92:
        return step_down(t, scratch, codes, start)
    if draw < 97:
        return insert_in_group(t, classes, scratch, codes, start)
    return remove_in_group(classes, scratch, codes, start)


@kernel
def penalised(swept: Swept, pressure: float, sum_share: float, time_weight: float) -> float:
    return time_weight * swept.recompute_ns + pressure * (swept.excess_max + sum_share * swept.excess_sum)


@kernel
def anneal(t: Tables, classes: Indices, scratch: Scratch, first: Indices, settings: Settings, capacity: int) -> Found:
    """The quickest sequence within the budget that was met (the lowest, with ``lower``), from ``first`` on."""
    current = np.zeros(capacity, np.int32)
    other = np.zeros(capacity, np.int32)
    best = np.zeros(capacity, np.int32)
    current[capacity - len(first) :] = first
    budget, pressure, weight = settings.budget_bytes, settings.pressure, settings.time_weight
    share = 4.0 / (t.nodes + 1)
    now = sweep(t, scratch, current, capacity - len(first), other, 0, 0, budget, np.inf, 0.0, 0.0, weight)
    current, other = other, current
    cost = penalised(now, pressure, share, weight)
    best_start, best_time, best_peak = capacity, 0, 0
    fresh = True
    low, high = settings.pressure / 100.0, settings.pressure * 100.0
    temperature = settings.hot
    cooling = (settings.cold / settings.hot) ** (1.0 / max(settings.iterations // 64, 1))
    for iteration in range(settings.iterations):
        if fresh and now.excess_max == 0:
            better = now.peak_bytes < best_peak if settings.lower > 0 else now.recompute_ns < best_time
            if best_start == capacity or better:
                best_start, best_time, best_peak = now.start, now.recompute_ns, now.peak_bytes
                best[best_start:] = current[best_start:]
                if settings.lower > 0:
                    if best_peak <= settings.target_bytes:
                        break
                    budget = now.peak_bytes - max(1, int(now.peak_bytes * settings.lower))
                    now = sweep(t, scratch, current, now.start, other, 0, 0, budget, np.inf, 0.0, 0.0, weight)
                    current, other = other, current
                    cost = penalised(now, pressure, share, weight)
        fresh = False
        if iteration % 64 == 63:
            temperature *= cooling
            pressure = min(pressure * settings.rate, high) if now.excess_max > 0 else max(pressure / settings.rate, low)
            cost = penalised(now, pressure, share, weight)
        insertions = propose(t, classes, scratch, current, now.start)
        if insertions < 0:
            continue
        coin = random_below(scratch.rng, _COINS) * 128
        draw = (random_below(scratch.rng, 1 << 30) + 1) / float(1 << 30)
        limit = cost - temperature * np.log(draw)
        trial = sweep(
            t, scratch, current, now.start, other, insertions, coin, budget, limit, pressure, pressure * share, weight
        )
        if trial.start >= 0:
            current, other = other, current
            now = trial
            cost = penalised(now, pressure, share, weight)
            fresh = True
    return Found(best[best_start:].copy(), best_time, best_peak, pressure)


def search(t: Tables, classes: Indices, first: Indices, settings: Settings, seed: int) -> Found:
    """``anneal`` with its own work space."""
    capacity = 6 * (t.nodes + 1) + 2 * len(first) + 64
    scratch: Scratch = make_scratch(t, capacity, seed)
    return anneal(t, classes, scratch, first, settings, capacity)
