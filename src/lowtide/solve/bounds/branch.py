"""Tightening the relaxation's bound by branching: storages are live or not, not a fraction of each.

Best-first: the leaf with the lowest bound is split on the column whose fraction counts most, S columns by bytes, then R
columns by time, or on one whose reduced cost is about 0. Each child starts from its parent's multipliers. The lowest
leaf bounds every schedule, whenever one stops. O(leaves x iterations x entries).
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from lowtide.solve.bounds.dual import Dual, improve
from lowtide.solve.bounds.relaxation import Covering, Floats

_CHILD_ITERATIONS = 320
_FRACTION = 1e-4  # less than this from 0 or 1 counts as whole
_UNDECIDED = 1e-6  # reduced costs and rows missed below this count as 0


class _Leaf(NamedTuple):
    bound: float
    ticket: int
    lower: Floats
    upper: Floats
    dual: Dual


def branch(program: Covering, root: Dual, splits: int, enough: float) -> float:
    """The bound after at most ``splits`` splits, or once it reaches ``enough``; not below that of ``root``."""
    columns = len(program.cost)
    leaves = [_Leaf(root.bound, 0, np.zeros(columns), np.ones(columns), root)]
    ticket = 0
    for _ in range(splits):
        leaf = leaves[0]
        column = _split_column(program, leaf)
        if leaf.bound >= enough or column < 0:
            break
        heapq.heappop(leaves)
        for value in (0.0, 1.0):
            ticket += 1
            lower, upper = leaf.lower.copy(), leaf.upper.copy()
            lower[column] = upper[column] = value
            dual = improve(program, leaf.dual, _CHILD_ITERATIONS, lower, upper)
            heapq.heappush(leaves, _Leaf(max(dual.bound, leaf.bound), ticket, lower, upper, dual))
    return leaves[0].bound


def _split_column(program: Covering, leaf: _Leaf) -> int:
    """The most fractional column, or one that the multipliers leave undecided; -1 where the leaf's x is whole and as
    good as its bound."""
    x, opened = leaf.dual.x, leaf.lower < leaf.upper
    distance = np.where(opened, np.minimum(x, 1.0 - x), 0.0)
    distance[distance < _FRACTION] = 0.0
    for scale in (program.weight, program.cost):
        score = distance * scale
        if score.max(initial=0.0) > 0:
            return int(score.argmax())
    multiplied = np.repeat(leaf.dual.y, np.diff(program.start)) * program.value
    reduced = program.cost - np.bincount(program.index, multiplied, len(x))
    score = np.where(opened, program.weight / (_UNDECIDED + np.abs(reduced)), 0.0)
    if _solved(program, leaf) or score.max(initial=0.0) <= 0:
        return -1
    return int(score.argmax())


def _solved(program: Covering, leaf: _Leaf) -> bool:
    rows = np.repeat(np.arange(len(program.right)), np.diff(program.start))
    reached = np.bincount(rows, program.value * leaf.dual.x[program.index], len(program.right))
    missed = float(np.max(program.right - reached, initial=0.0))
    return missed <= _UNDECIDED and float(program.cost @ leaf.dual.x) <= leaf.bound + _UNDECIDED
