"""Simulated annealing over compute sequences, compiled: the engine of ``auto`` and of ``minimum_peak``.

Cost of a sequence, in nanoseconds: ``time_weight`` x recompute time + ``pressure`` x (largest excess over the budget +
the mean excess over steps x 4). The pressure (nanoseconds per byte) rises while the current sequence is over the
budget and falls while it fits, so that the search swings about the boundary of what is feasible, where good sequences
are. With ``rate`` 1 the pressure stays as it is: where it is high, what fits is not left again, which finds more where the
budget is so small that little fits.

With ``lower`` > 0 the budget follows the search down: whenever a sequence fits, the budget becomes its peak less that
fraction, and the run ends at ``target_bytes``. This minimises the peak. Without, it ends at ``target_ns``, which a lower
bound gives.

The number of iterations is fixed and all randomness comes from the seed: the same arguments give the same sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.native import core


def make_state(seed: int) -> core.Random:
    """A generator of random numbers (splitmix64: Steele, Lea and Flood, OOPSLA 2014), well mixed for neighbouring seeds."""
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
