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
    weight = first_weight(program)
    return Dual(*_ascend(matrix, program.cost, program.right, lower, upper, x, y, weight, iterations))


@kernel
def _multiply(start: Indices, index: Indices, value: Floats, x: Floats, out: Floats) -> None:
    for row in range(len(start) - 1):
        total = 0.0
        for i in range(start[row], start[row + 1]):
            total += value[i] * x[index[i]]
        out[row] = total


@kernel
def _safe_bound(matrix: Matrix, cost: Floats, right: Floats, lower: Floats, upper: Floats, y: Floats) -> float:
    """The bound that ``y`` proves, rounding errors taken off."""
    total, size = 0.0, 1.0
    for row in range(len(y)):
        total += right[row] * y[row]
        size += abs(right[row] * y[row])
    for column in range(len(cost)):
        reduced = cost[column]
        for i in range(matrix.column_start[column], matrix.column_start[column + 1]):
            part = matrix.column_value[i] * y[matrix.column_index[i]]
            reduced -= part
            size += abs(part)
        total += reduced * (lower[column] if reduced > 0 else upper[column])
    return total - _MARGIN * size


@kernel
def _error(cost: Floats, right: Floats, bound: float, x: Floats, ax: Floats, weight: float) -> float:
    """How far from optimal: rows missed and the gap between the two objectives."""
    gap, missed = -bound, 0.0
    for column in range(len(x)):
        gap += cost[column] * x[column]
    for row in range(len(right)):
        missed += max(right[row] - ax[row], 0.0) ** 2
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


@kernel
def _ascend(
    matrix: Matrix,
    cost: Floats,
    right: Floats,
    lower: Floats,
    upper: Floats,
    x: Floats,
    y: Floats,
    weight: float,
    iterations: int,
) -> tuple[float, Floats, Floats, float]:
    """Safe bound, solution, multipliers and primal weight; ``x`` and ``y`` are overwritten."""
    columns, rows = len(cost), len(right)
    x_step = _steps(matrix.column_start, matrix.column_value)
    y_step = _steps(matrix.row_start, matrix.row_value)
    aty, ax, old = np.zeros(columns), np.zeros(rows), np.zeros(rows)
    x_sum, y_sum = np.zeros(columns), np.zeros(rows)
    _multiply(matrix.row_start, matrix.row_index, matrix.row_value, x, ax)
    _multiply(matrix.column_start, matrix.column_index, matrix.column_value, y, aty)
    best = _safe_bound(matrix, cost, right, lower, upper, y)
    last_x, best_y = x.copy(), y.copy()
    x_from, y_from = x.copy(), y.copy()
    least_weight, most_weight = weight / _WEIGHT_RANGE, weight * _WEIGHT_RANGE
    at_restart = _error(cost, right, best, x, ax, weight)
    before, since = at_restart, 0
    for iteration in range(1, iterations + 1):
        for column in range(columns):
            moved = x[column] - x_step[column] / weight * (cost[column] - aty[column])
            x[column] = min(max(moved, lower[column]), upper[column])
        old[:] = ax
        _multiply(matrix.row_start, matrix.row_index, matrix.row_value, x, ax)
        for row in range(rows):
            y[row] = max(y[row] + y_step[row] * weight * (right[row] - 2 * ax[row] + old[row]), 0.0)
        _multiply(matrix.column_start, matrix.column_index, matrix.column_value, y, aty)
        x_sum += x
        y_sum += y
        since += 1
        if iteration % _PERIOD != 0 and iteration != iterations:
            continue
        x_mean, y_mean = x_sum / since, y_sum / since
        ax_mean = np.zeros(rows)
        _multiply(matrix.row_start, matrix.row_index, matrix.row_value, x_mean, ax_mean)
        here = _safe_bound(matrix, cost, right, lower, upper, y)
        mean = _safe_bound(matrix, cost, right, lower, upper, y_mean)
        if here > best:
            best = here
            best_y[:] = y
        if mean > best:
            best = mean
            best_y[:] = y_mean
        error = _error(cost, right, here, x, ax, weight)
        error_mean = _error(cost, right, mean, x_mean, ax_mean, weight)
        least = min(error, error_mean)
        last_x[:] = x if error <= error_mean else x_mean
        if least <= 0.2 * at_restart or (least <= 0.8 * at_restart and least > before) or since >= 0.36 * iteration:
            if error_mean < error:
                x[:] = x_mean
                y[:] = y_mean
                ax[:] = ax_mean
                _multiply(matrix.column_start, matrix.column_index, matrix.column_value, y, aty)
            moved_x = np.sqrt(np.sum((x - x_from) ** 2))
            moved_y = np.sqrt(np.sum((y - y_from) ** 2))
            if moved_x > 1e-10 and moved_y > 1e-10:
                weight = min(max(np.sqrt(moved_y / moved_x * weight), least_weight), most_weight)
            x_from[:] = x
            y_from[:] = y
            x_sum[:] = 0.0
            y_sum[:] = 0.0
            since = 0
            at_restart = before = least
            if least < 1e-8:
                break
        else:
            before = least
    return best, last_x, best_y, weight
