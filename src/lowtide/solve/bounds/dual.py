"""Bounds of covering programs from dual solutions: a primal-dual first-order method, and a safe evaluation.

For minimise c x with A x >= b, l <= x <= u, every y >= 0 proves the bound b y + sum over j of the least of
(c - A' y)_j x_j between l_j and u_j. ``ascend`` looks for a good y by the primal-dual hybrid gradient method with
diagonal steps (Pock and Chambolle 2011), restarts from averages and primal weights (Applegate et al. 2021,
arXiv 2106.04756, sections 4 and 5); whatever it returns is a bound, as ``y`` need not be optimal. The evaluation is in
floating point with a margin for its rounding taken off. O(iterations x entries of A).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.bounds.relaxation import Covering, Floats
from lowtide.solve.model.compact import Indices
from lowtide.solve.model.compiled import kernel

_PERIOD = 40  # iterations between looks at the progress
_WEIGHT_RANGE = 30.0  # how far the primal weight may move from its start; without limit it degenerates at optima
_MARGIN = 1e-12  # relative to the sum of the magnitudes: far above what rounding can do


class Matrix(NamedTuple):
    """A by rows and by columns."""

    row_start: Indices
    row_index: Indices
    row_value: Floats
    column_start: Indices
    column_index: Indices
    column_value: Floats


class Bounded(NamedTuple):
    """Costs, right sides, and the bounds of the columns."""

    cost: Floats
    right: Floats
    lower: Floats
    upper: Floats


class Dual(NamedTuple):
    """``bound`` is safe; ``x`` is a nearly optimal solution that goes with it; ``weight`` the last primal weight."""

    bound: float
    x: Floats
    y: Floats
    weight: float


def make_matrix(program: Covering) -> Matrix:
    order = np.argsort(program.index, kind="stable")
    rows = np.repeat(np.arange(len(program.right), dtype=np.int32), np.diff(program.start))
    start = np.zeros(len(program.cost) + 1, np.int32)
    np.cumsum(np.bincount(program.index, minlength=len(program.cost)), out=start[1:])
    return Matrix(program.start, program.index, program.value, start, rows[order], program.value[order])


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
    x, y = np.minimum(np.maximum(begin.x, lower), upper), begin.y.copy()
    bounded = Bounded(program.cost, program.right, lower, upper)
    return Dual(*_ascend(matrix, bounded, x, y, first_weight(program), iterations))


@kernel
def _multiply(start: Indices, index: Indices, value: Floats, x: Floats, out: Floats) -> None:
    for row in range(len(start) - 1):
        total = 0.0
        for i in range(start[row], start[row + 1]):
            total += value[i] * x[index[i]]
        out[row] = total


@kernel
def _safe_bound(matrix: Matrix, program: Bounded, y: Floats) -> float:
    """The bound that ``y`` proves, rounding errors taken off."""
    total, size = 0.0, 1.0
    for row in range(len(y)):
        total += program.right[row] * y[row]
        size += abs(program.right[row] * y[row])
    for column in range(len(program.cost)):
        reduced = program.cost[column]
        for i in range(matrix.column_start[column], matrix.column_start[column + 1]):
            part = matrix.column_value[i] * y[matrix.column_index[i]]
            reduced -= part
            size += abs(part)
        total += reduced * (program.lower[column] if reduced > 0 else program.upper[column])
    return total - _MARGIN * size


@kernel
def _error(program: Bounded, bound: float, x: Floats, ax: Floats, weight: float) -> float:
    """How far from optimal: rows missed and the gap between the two objectives."""
    gap, missed = -bound, 0.0
    for column in range(len(x)):
        gap += program.cost[column] * x[column]
    for row in range(len(ax)):
        missed += max(program.right[row] - ax[row], 0.0) ** 2
    return float(np.sqrt(weight * weight * missed + gap * gap))


@kernel
def _steps(start: Indices, value: Floats) -> Floats:
    """1 / the sum of magnitudes of each row."""
    out = np.ones(len(start) - 1)
    for row in range(len(out)):
        total = 0.0
        for i in range(start[row], start[row + 1]):
            total += abs(value[i])
        if total > 0:
            out[row] = 1.0 / total
    return out


class _Ascent(NamedTuple):
    """The point at hand, its products with A, sums since the last restart, and the point of that restart."""

    x: Floats
    y: Floats
    ax: Floats
    aty: Floats
    x_sum: Floats
    y_sum: Floats
    x_from: Floats
    y_from: Floats


@kernel
def _step(
    matrix: Matrix, program: Bounded, at: _Ascent, x_step: Floats, y_step: Floats, weight: float, old: Floats
) -> None:
    """One iteration of the primal-dual hybrid gradient method; ``old`` is room for the last A x."""
    for column in range(len(at.x)):
        moved = at.x[column] - x_step[column] / weight * (program.cost[column] - at.aty[column])
        at.x[column] = min(max(moved, program.lower[column]), program.upper[column])
    old[:] = at.ax
    _multiply(matrix.row_start, matrix.row_index, matrix.row_value, at.x, at.ax)
    for row in range(len(at.y)):
        at.y[row] = max(at.y[row] + y_step[row] * weight * (program.right[row] - 2 * at.ax[row] + old[row]), 0.0)
    _multiply(matrix.column_start, matrix.column_index, matrix.column_value, at.y, at.aty)
    at.x_sum[:] += at.x
    at.y_sum[:] += at.y


@kernel
def _restart(at: _Ascent, weight: float, first: float) -> float:
    """Begin again from the point at hand; the primal weight that the way to it suggests."""
    moved_x = np.sqrt(np.sum((at.x - at.x_from) ** 2))
    moved_y = np.sqrt(np.sum((at.y - at.y_from) ** 2))
    if moved_x > 1e-10 and moved_y > 1e-10:
        weight = min(max(np.sqrt(moved_y / moved_x * weight), first / _WEIGHT_RANGE), first * _WEIGHT_RANGE)
    at.x_from[:] = at.x
    at.y_from[:] = at.y
    at.x_sum[:] = 0.0
    at.y_sum[:] = 0.0
    return weight


@kernel
def _ascend(
    matrix: Matrix, program: Bounded, x: Floats, y: Floats, first_weight: float, iterations: int
) -> tuple[float, Floats, Floats, float]:
    """Safe bound, solution, multipliers and primal weight; ``x`` and ``y`` are overwritten."""
    columns, rows, weight = len(x), len(y), first_weight
    x_step = _steps(matrix.column_start, matrix.column_value)
    y_step = _steps(matrix.row_start, matrix.row_value)
    at = _Ascent(x, y, np.zeros(rows), np.zeros(columns), np.zeros(columns), np.zeros(rows), x.copy(), y.copy())
    old, ax_mean = np.zeros(rows), np.zeros(rows)
    _multiply(matrix.row_start, matrix.row_index, matrix.row_value, x, at.ax)
    _multiply(matrix.column_start, matrix.column_index, matrix.column_value, y, at.aty)
    best = _safe_bound(matrix, program, y)
    last_x, best_y = x.copy(), y.copy()
    at_restart = _error(program, best, x, at.ax, weight)
    before, since = at_restart, 0
    for iteration in range(1, iterations + 1):
        _step(matrix, program, at, x_step, y_step, weight, old)
        since += 1
        if iteration % _PERIOD != 0 and iteration != iterations:
            continue
        x_mean, y_mean = at.x_sum / since, at.y_sum / since
        _multiply(matrix.row_start, matrix.row_index, matrix.row_value, x_mean, ax_mean)
        here, mean = _safe_bound(matrix, program, y), _safe_bound(matrix, program, y_mean)
        if here > best:
            best = here
            best_y[:] = y
        if mean > best:
            best = mean
            best_y[:] = y_mean
        error = _error(program, here, x, at.ax, weight)
        error_mean = _error(program, mean, x_mean, ax_mean, weight)
        least = min(error, error_mean)
        last_x[:] = x if error <= error_mean else x_mean
        if least <= 0.2 * at_restart or (least <= 0.8 * at_restart and least > before) or since >= 0.36 * iteration:
            if error_mean < error:
                x[:] = x_mean
                y[:] = y_mean
                at.ax[:] = ax_mean
                _multiply(matrix.column_start, matrix.column_index, matrix.column_value, y, at.aty)
            weight = _restart(at, weight, first_weight)
            since, at_restart = 0, least
            if least < 1e-8:
                break
        before = least
    return best, last_x, best_y, weight
