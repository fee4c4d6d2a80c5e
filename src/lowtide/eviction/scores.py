"""The heuristics: the storage with the least score is evicted. Kirisame et al., section 3 and its appendices.

    dtr         (own cost + evicted neighbourhood) / (bytes x staleness)
    dtr-eq      the same with connected components in place of the exact neighbourhood
    dtr-local   own cost / (bytes x staleness)
    msps        (own cost + evicted ancestors) / bytes      (Peng et al., Capuchin, ASPLOS 2020: memory saved per second)
    lru         1 / staleness
    size        1 / bytes                                    (largest first)
    random      a number at random

Costs and staleness (time since the last access) in nanoseconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.eviction.neighbourhood import Alone, Connected, Exact, Graph, Neighbourhood


@dataclass(frozen=True, slots=True)
class Facts:
    """About one storage that could be evicted."""

    bytes: int
    cost_ns: int
    around_ns: int
    stale_ns: int


Score = Callable[[Facts, random.Random], float]


def _rate(facts: Facts, around_ns: int) -> float:
    return (facts.cost_ns + around_ns) / (facts.bytes * (facts.stale_ns + 1))


HEURISTICS: dict[str, Score] = {
    "dtr-eq": lambda facts, _: _rate(facts, facts.around_ns),
    "dtr": lambda facts, _: _rate(facts, facts.around_ns),
    "dtr-local": lambda facts, _: _rate(facts, 0),
    "lru": lambda facts, _: 1.0 / (facts.stale_ns + 1),
    "size": lambda facts, _: 1.0 / facts.bytes,
    "msps": lambda facts, _: (facts.cost_ns + facts.around_ns) / facts.bytes,
    "random": lambda _, draw: draw.random(),
}


def score_of(heuristic: str) -> Score:
    """Raises ``PlanError`` naming what is known."""
    if heuristic not in HEURISTICS:
        known = ", ".join(HEURISTICS)
        raise PlanError(f"dtr: no heuristic is named {heuristic!r}; known: {known}; write 'dtr{{heuristic=lru}}'")
    return HEURISTICS[heuristic]


def neighbourhood_for(heuristic: str, graph: Graph) -> Neighbourhood:
    """What the heuristic wants to know of the evicted storages around one."""
    if heuristic == "dtr-eq":
        return Connected(graph)
    if heuristic in ("dtr", "msps"):
        return Exact(graph, descendants=heuristic == "dtr")
    return Alone()
