"""Random numbers of the searches: the splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014)."""

from __future__ import annotations

import numpy as np

from lowtide.native import core

Random = core.Random


def make_state(seed: int) -> Random:
    """A generator, its state well mixed for neighbouring seeds."""
    return Random(int(np.random.default_rng(seed).integers(0, 2**63, 1, np.uint64)[0]))
