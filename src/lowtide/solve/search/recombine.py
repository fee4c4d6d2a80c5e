"""Recombination: from two sequences a third, which recomputes before some stretch of the program as the second does and
elsewhere as the first does.

Runs from different beginnings agree in most of the program and are good in different parts of it; no single move leads
from one to the other through sequences that fit. Any mixture is a sequence, as every recompute stands after the first
compute of its node: what it reads lives on to it. Whether it fits is for the following run to see to.
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
    """The codes of ``first``, but those of ``second`` from one to another of the nodes before which the two differ: a
    quarter to three quarters of these nodes."""
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
    """Where each node's stretch begins, its first compute with the recomputes right before it, the end node's included;
    and where the last one ends."""
    return np.concatenate([[0], np.flatnonzero(codes >= 0) + 1])


def _differing(ours: Indices, our_lengths: Places, theirs: Indices, their_lengths: Places) -> Places:
    """The nodes whose stretches are not equal."""
    differ = our_lengths != their_lengths
    alike = np.flatnonzero(~differ)  # in length
    nodes = np.repeat(alike, our_lengths[alike])
    unequal = ours[np.repeat(~differ, our_lengths)] != theirs[np.repeat(~differ, their_lengths)]
    differ[nodes[unequal]] = True
    return np.flatnonzero(differ)


def children(population: Sequence[Candidate], count: int, rng: core.Random) -> list[Indices]:
    """Mixtures of the best, or of any, with any other; the only one itself where there are no two."""
    made = []
    for _ in range(count):
        size = len(population)
        first = 0 if rng.below(2) == 0 else rng.below(size)
        other = (first + 1 + rng.below(max(size - 1, 1))) % size
        made.append(crossed(population[first], population[other], rng))
    return made


def survivors(candidates: Iterable[Candidate], count: int) -> list[Candidate]:
    """The quickest, at most ``count``, no two of the same time."""
    distinct: dict[int, Candidate] = {}
    for candidate in quickest(candidates):
        distinct.setdefault(candidate.recompute_ns, candidate)
    return list(distinct.values())[:count]
