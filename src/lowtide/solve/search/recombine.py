"""Recombination: mix two sequences into a third, with the recomputes of the second in one stretch of the program and those of
the first elsewhere.

Runs from different starts agree in most of the program and are good in different parts of it, but no series of single moves
leads from one to the other through sequences that fit. Every mixture is a valid sequence, as each recompute comes after the
first compute of its node: its inputs stay live until then. The following annealing run has to make the mixture fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.solve.model.compact import Indices
from lowtide.solve.model.sweep import Candidate, quickest

Places = npt.NDArray[np.intp]


def crossed(first: Candidate, second: Candidate, rng: core.Random) -> Indices:
    """Return the codes of ``first`` with a stretch from ``second``, which covers a quarter to three quarters of the nodes at
    which the two differ."""
    ours, theirs = _stretches(first.codes), _stretches(second.codes)
    differing = _differing(first.codes, np.diff(ours), second.codes, np.diff(theirs))
    count = len(differing)
    if count < 2:
        return first.codes
    taken = max(count // 4, 1) + rng.below(count // 2)
    begin = rng.below(count - taken + 1)
    low, high = differing[begin], differing[begin + taken - 1]
    head, tail = first.codes[: ours[low]], first.codes[ours[high + 1] :]
    return np.concatenate([head, second.codes[theirs[low] : theirs[high + 1]], tail])


def _stretches(codes: Indices) -> Places:
    """Return the position at which each node's stretch begins, the end node's included, and the end of the last. A stretch is
    a node's first compute with the recomputes right before it."""
    return np.concatenate([[0], np.flatnonzero(codes >= 0) + 1])


def _differing(ours: Indices, our_lengths: Places, theirs: Indices, their_lengths: Places) -> Places:
    """Return the nodes whose stretches differ."""
    differ = our_lengths != their_lengths
    alike = np.flatnonzero(~differ)  # in length
    nodes = np.repeat(alike, our_lengths[alike])
    unequal = ours[np.repeat(~differ, our_lengths)] != theirs[np.repeat(~differ, their_lengths)]
    differ[nodes[unequal]] = True
    return np.flatnonzero(differ)


def children(population: Sequence[Candidate], count: int, rng: core.Random) -> list[Indices]:
    """Return ``count`` mixtures of the best or a random member with a random other; of a single member, that itself."""
    made = []
    for _ in range(count):
        size = len(population)
        first = 0 if rng.below(2) == 0 else rng.below(size)
        other = (first + 1 + rng.below(max(size - 1, 1))) % size
        made.append(crossed(population[first], population[other], rng))
    return made


def survivors(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """Return the quickest candidates, at most ``count``, no two of equal time."""
    distinct: dict[int, Candidate] = {}
    for candidate in quickest(candidates):
        distinct.setdefault(candidate.recompute_ns, candidate)
    return list(distinct.values())[:count]
