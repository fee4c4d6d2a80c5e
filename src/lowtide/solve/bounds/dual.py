"""Bounds of covering programs from dual solutions: a primal-dual first-order method, and a safe evaluation.

For minimise c x with A x >= b, l <= x <= u, every y >= 0 proves the bound b y + sum over j of the least of
(c - A' y)_j x_j between l_j and u_j. The extension looks for a good y by the primal-dual hybrid gradient method with
diagonal steps (Pock and Chambolle 2011), restarts from averages and primal weights (Applegate et al. 2021,
arXiv 2106.04756, sections 4 and 5); whatever it returns is a bound, as ``y`` need not be optimal. The evaluation is in
floating point with a margin for its rounding taken off. O(iterations x entries of A).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.native import core
from lowtide.solve.bounds.relaxation import Covering, Floats


class Dual(NamedTuple):
    """``bound`` is safe; ``x`` is a nearly optimal solution that goes with it."""

    bound: float
    x: Floats
    y: Floats


def no_dual(program: Covering) -> Dual:
    """Zero, which proves nothing: a start for ``improve``."""
    return Dual(0.0, np.zeros(len(program.cost)), np.zeros(len(program.right)))


def improve(
    program: Covering, begin: Dual, iterations: int, lower: Floats | None = None, upper: Floats | None = None
) -> Dual:
    """``iterations`` more from ``begin``, columns between these bounds (0 and 1 unless given); the best y seen."""
    lower = np.zeros(len(program.cost)) if lower is None else lower
    upper = np.ones(len(program.cost)) if upper is None else upper
    length = float(np.linalg.norm(program.right))  # costs against right sides: a start for the primal weight
    weight = max(float(np.linalg.norm(program.cost)) / length if length > 0 else 1.0, 1e-9)
    x, sides = np.minimum(np.maximum(begin.x, lower), upper), (program.cost, program.right)
    return Dual(*core.ascend(program.matrix, *sides, lower, upper, x, begin.y, weight, iterations)[:3])
