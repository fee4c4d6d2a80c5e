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

Matrix = core.Matrix


class Dual(NamedTuple):
    """``bound`` is safe; ``x`` is a nearly optimal solution that goes with it; ``weight`` the last primal weight."""

    bound: float
    x: Floats
    y: Floats
    weight: float


def make_matrix(program: Covering) -> Matrix:
    """The program's A by rows and by columns."""
    return Matrix(program.start, program.index, program.value, len(program.cost))


def solve_dual(program: Covering, iterations: int) -> Dual:
    """From zero, all columns between 0 and 1."""
    zeros, ones = np.zeros(len(program.cost)), np.ones(len(program.cost))
    begin = Dual(0.0, zeros, np.zeros(len(program.right)), first_weight(program))
    return improve(program, make_matrix(program), zeros, ones, begin, iterations)


def first_weight(program: Covering) -> float:
    """Length of the costs against that of the right sides, a start for the primal weight."""
    length = float(np.linalg.norm(program.right))
    return max(float(np.linalg.norm(program.cost)) / length if length > 0 else 1.0, 1e-9)


def improve(program: Covering, matrix: Matrix, lower: Floats, upper: Floats, begin: Dual, iterations: int) -> Dual:
    """``iterations`` more from ``begin``, with these bounds of the columns; the best y seen."""
    x, weight = np.minimum(np.maximum(begin.x, lower), upper), first_weight(program)
    return Dual(*core.ascend(matrix, program.cost, program.right, lower, upper, x, begin.y, weight, iterations))
