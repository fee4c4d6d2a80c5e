"""Many cuts, for small budgets: there operators are recomputed several times, and few gaps count each of them a few times only.

The gaps of a relaxation are halved level by level, each at the instant about its middle that leaves the least room for what is
kept. A gap that is split becomes a window of two parts, and any two gaps in a row are a window too: the windows overlap as they
do in a binary tree with shifted nodes, and there are a few times as many as gaps, where all pairs of cuts would be too many.
Recomputes are in a window only if they are in one of its parts, so that links between levels are short.

Every level starts from the multipliers of the one before (``cuts``), so that a few hundred iterations bring it close to its
optimum. No level is weaker than the one before. O(levels x (windows x entries of one) x iterations).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lowtide.solve.bounds.cuts import Relaxed, on_windows
from lowtide.solve.bounds.liveness import Liveness
from lowtide.solve.bounds.relaxation import Window
from lowtide.solve.model.compact import Numbers

_MOST = 4_000  # iterations of a level
_FEW = 12  # cuts that are tried in any case
_WORTH = 1e-3  # beyond, two levels in a row must add this share of the program's time


def refine(facts: Liveness, relaxed: Relaxed, kept_bytes: Numbers, cuts: int, work: int, enough: float) -> Relaxed:
    """The relaxation after levels of about ``work`` iterations x entries each, until it has ``cuts`` cuts or more, or its bound
    is ``enough``, or levels add nothing. ``kept_bytes``: bytes resident at each instant without recomputation; only instants
    over the budget are cut at, and none of the forward pass where others are."""
    over = np.flatnonzero(kept_bytes[:-1] > facts.room_bytes)
    backward = over[over >= facts.model.boundary]
    instants: Numbers = backward if len(backward) else over
    before = -1.0  # bound of the level before the last
    while len(relaxed.program.cuts) < cuts and relaxed.dual.bound < min(enough, 1e9):
        split = _split(facts, relaxed, instants)
        if split is None:
            break
        finer = on_windows(facts, relaxed, split, work, _MOST)
        if len(finer.program.cuts) > _FEW and finer.dual.bound < before + _WORTH:
            return finer
        before, relaxed = relaxed.dual.bound, finer
    return relaxed


def _split(facts: Liveness, relaxed: Relaxed, instants: Numbers) -> dict[Window, Sequence[Window]] | None:
    """The windows after every gap was split; ``None`` where none can be."""
    windows: dict[Window, Sequence[Window]] = dict(relaxed.program.windows)
    line = [*relaxed.program.cuts, facts.model.nodes + 1]
    middles = []
    for begin, end in itertools.pairwise((-1, *line)):  # what is before the first cut is no gap, but can be cut
        inside = instants[(instants > begin) & (instants < end)]
        if not len(inside):
            continue
        middle = _middle(inside, facts.instant_bytes)
        middles.append(middle)
        if begin >= 0:
            windows[begin, end] = ((begin, middle), (middle, end))
    line = sorted((*line, *middles))
    for gap in itertools.pairwise(line):
        windows.setdefault(gap, ())
    for begin, middle, end in zip(line[:-2], line[1:-1], line[2:], strict=True):
        windows.setdefault((begin, end), ((begin, middle), (middle, end)))
    return windows if middles else None


def _middle(inside: Numbers, taken_bytes: Numbers) -> int:
    """Of the middle half of the instants the one at which most bytes are taken for certain, nearest to the middle."""
    quarter = len(inside) // 4
    half = inside[quarter : max(3 * len(inside) // 4, quarter + 1)]
    highest = np.flatnonzero(taken_bytes[half] == taken_bytes[half].max())
    return int(half[highest[np.abs(2 * highest - len(half)).argmin()]])
