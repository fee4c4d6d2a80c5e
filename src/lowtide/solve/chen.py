"""Checkpointing planners after Chen et al. and their generalisations: they choose which forward nodes to keep.

Heuristics without guarantee; bytes matter only afterwards: every candidate is simulated and the quickest that fits is the
answer. Forward nodes are those of the compact model (views merged); ``docs/planners/checkpointing.md`` says which of them
each planner keeps, and ``lowtide.solve.model.checkpoints`` how the others are recomputed.

Chen et al. 2016 (arXiv 1604.06174, section 4): sqrt is their O(sqrt(n)) algorithm, greedy their Algorithm 3 with its budget
b swept. They assume a chain of layers; on a chain the chen, ap and linearized planners agree. Checkmate (Jain et al. 2020,
arXiv 1910.02653, section 6 and appendix B) restricts the candidates to articulation points (ap) or takes the program's
order for a chain (linearized). Moving back to the last articulation point keeps Chen's spacing where these are unevenly
spread; it is ours.

The sweep over b visits all values at which the choice changes, or, if these are closer than 1/32 apart, steps by that
ratio. The candidates do not depend on the budget, so a larger budget is never slower. Time: candidates x graph size;
``checkpoint-last``: the square of the graph's size.

Deviations: the segment after the last checkpoint is not dropped, as the backward pass begins with it. Checkmate's
checkpoint-last keeps only the latest node in the forward pass too, and drops gradients; here the forward pass runs as
written and gradients stay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from lowtide.solve.model.checkpoints import Readers, kept_sequence, make_readers, nothing_kept_sequence
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.structure import articulation_points
from lowtide.solve.options import Options
from lowtide.solve.outcome import quickest_fitting
from lowtide.solve.problem import Planner, Problem, Solution

_STEP = 32  # each step of the sweep over b raises it by at least 1/32
_SIMULATED = 3  # how many of the quickest that fit are simulated


def every_root(model: CompactGraph, candidates: Sequence[int]) -> list[list[int]]:
    """Return one set: every floor(sqrt(n))-th of the n candidates."""
    spacing = max(math.isqrt(len(candidates)), 1)
    return [list(candidates[spacing - 1 :: spacing])]


def greedy_sets(model: CompactGraph, candidates: Sequence[int]) -> list[list[int]]:
    """Return the sets of the sweep over b, from all candidates to none, each once."""
    own = np.zeros(model.boundary + 1, np.int64)
    forward = model.storage_node < model.boundary
    np.add.at(own, model.storage_node[forward] + 1, model.storage_bytes[forward])
    until = np.cumsum(own)[np.asarray(candidates, np.int64) + 1].tolist()
    sets: list[list[int]] = []
    size = 0
    while True:
        chosen, weights = _exceeding(until, size)
        if not chosen:
            return sets
        checkpoints = [candidates[index] for index in chosen]
        if not sets or sets[-1] != checkpoints:
            sets.append(checkpoints)
        size = max(min(weights), size + size // _STEP)


def _exceeding(until: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Return the positions at which the bytes since the last chosen position exceed ``size``, and those bytes. ``until`` holds
    cumulative bytes."""
    chosen, weights, since = [], [], 0
    for index, total in enumerate(until):
        if total - since > size:
            chosen.append(index)
            weights.append(total - since)
            since = total
    return chosen, weights


def moved_back(sets: Iterable[list[int]], points: Sequence[int]) -> Iterator[list[int]]:
    """Replace each checkpoint by the last articulation point at or before it; drop those that have none."""
    for checkpoints in sets:
        places = np.searchsorted(points, checkpoints, side="right") - 1
        yield sorted({points[place] for place in places if place >= 0})


def checkpointing(class_name: str, sequences: Callable[[Readers], Iterable[Indices]]) -> type[Planner]:
    """Make a planner class without options whose answer is the quickest of the ``sequences`` that fits."""

    def search(self: Options, problem: Problem) -> Solution:
        return quickest_fitting(self.name, problem, lambda model: sequences(make_readers(model)), _SIMULATED)

    namespace = {"search": search, "__doc__": "No options.", "__module__": __name__}
    return dataclasses.make_dataclass(class_name, [], bases=(Options,), namespace=namespace, frozen=True)


def _keeping(class_name: str, sets: Callable[[CompactGraph, Sequence[int]], Iterable[Sequence[int]]]) -> type[Planner]:
    """Make a planner class that tries each distinct set of checkpoints. ``sets`` gets the model and its articulation points."""

    def sequences(readers: Readers) -> Iterator[Indices]:
        model = readers.model
        for checkpoints in dict.fromkeys(tuple(chosen) for chosen in sets(model, articulation_points(model))):
            yield kept_sequence(readers, checkpoints)

    return checkpointing(class_name, sequences)


def _nodes(model: CompactGraph) -> range:
    return range(model.boundary)


ChenSqrt = _keeping("ChenSqrt", lambda model, points: moved_back(every_root(model, _nodes(model)), points))
ChenGreedy = _keeping("ChenGreedy", lambda model, points: moved_back(greedy_sets(model, _nodes(model)), points))
ApSqrt = _keeping("ApSqrt", every_root)
ApGreedy = _keeping("ApGreedy", greedy_sets)
LinearizedSqrt = _keeping("LinearizedSqrt", lambda model, _: every_root(model, _nodes(model)))
LinearizedGreedy = _keeping("LinearizedGreedy", lambda model, _: greedy_sets(model, _nodes(model)))
CheckpointAllAp = _keeping("CheckpointAllAp", lambda _, points: [points])
CheckpointLast = checkpointing("CheckpointLast", lambda readers: [nothing_kept_sequence(readers)])
