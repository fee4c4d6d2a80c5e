"""Random numbers for compiled kernels: the splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lowtide.solve.model.compiled import inner

States = npt.NDArray[np.uint64]


def make_state(seed: int) -> States:
    """One word of state, well mixed for neighbouring seeds."""
    return np.random.default_rng(seed).integers(0, 2**63, 1, np.uint64)


@inner
def random_below(rng: States, bound: int) -> int:
    """A number in ``range(bound)``."""
    rng[0] += np.uint64(0x9E3779B97F4A7C15)
    z = rng[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return int((z >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32))
