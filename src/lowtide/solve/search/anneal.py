"""Simulated annealing over compute sequences, compiled: the engine of ``auto`` and of ``minimum_peak``.

Cost of a sequence, in nanoseconds: ``time_weight`` x recompute time + ``pressure`` x (largest excess over the budget +
the mean excess over steps x 4). The pressure (nanoseconds per byte) rises while the current sequence is over the
budget and falls while it fits, so that the search oscillates about the boundary of feasibility, where good sequences are.
With ``rate`` 1 the pressure is constant: a high pressure keeps the search within the budget once it fits, which finds more
when the budget is so small that few sequences fit.

With ``lower`` > 0 the run minimises the peak: whenever a sequence fits, the budget becomes its peak less that fraction, and
the run ends at ``target_bytes``. Otherwise it ends at ``target_ns``, which comes from a lower bound.

The number of iterations is fixed and all randomness comes from the seed: the same arguments give the same sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.native import core


def make_state(seed: int) -> core.Random:
    """Make a random generator (splitmix64: Steele, Lea and Flood, OOPSLA 2014), well mixed for neighbouring seeds."""
    return core.Random(int(np.random.default_rng(seed).integers(0, 2**63, 1, np.uint64)[0]))


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
