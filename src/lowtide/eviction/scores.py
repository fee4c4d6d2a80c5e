"""The heuristics: the storage with the least score is evicted. Kirisame et al., section 2 and appendices.

    dtr         (own cost + evicted neighbourhood) / (bytes x staleness)
    dtr-eq      the same with connected components in place of the exact neighbourhood
    e-star      own cost + evicted neighbourhood             (that of theorem 3.1)
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
from functools import partial

from lowtide.errors import LowtideError
from lowtide.eviction.entry import Entry
from lowtide.eviction.neighbourhood import Connected, Exact, Neighbourhood

Score = Callable[[Entry, int, int, random.Random], float]  # of an entry, its neighbourhood's cost and its staleness


def _rate(entry: Entry, neighbourhood_ns: int, stale_ns: int, draw: random.Random) -> float:
    return (entry.cost_ns + neighbourhood_ns) / (entry.bytes * (stale_ns + 1))


# A heuristic's score, and what it wants to know of the evicted storages around one.
HEURISTICS: dict[str, tuple[Score, Callable[[], Neighbourhood]]] = {
    "dtr-eq": (_rate, Connected),
    "dtr": (_rate, Exact),
    "e-star": (lambda entry, neighbourhood_ns, _stale_ns, _draw: entry.cost_ns + neighbourhood_ns, Exact),
    "dtr-local": (_rate, Neighbourhood),
    "lru": (lambda _entry, _neighbourhood_ns, stale_ns, _draw: 1.0 / (stale_ns + 1), Neighbourhood),
    "size": (lambda entry, _neighbourhood_ns, _stale_ns, _draw: 1.0 / entry.bytes, Neighbourhood),
    "msps": (
        lambda entry, neighbourhood_ns, _stale_ns, _draw: (entry.cost_ns + neighbourhood_ns) / entry.bytes,
        partial(Exact, descendants=False),
    ),
    "random": (lambda _entry, _neighbourhood_ns, _stale_ns, draw: draw.random(), Neighbourhood),
}


def heuristic_named(name: str) -> tuple[Score, Callable[[], Neighbourhood]]:
    """Raises ``LowtideError`` naming what is known."""
    if name not in HEURISTICS:
        raise LowtideError(f"no heuristic is named {name!r}; known: {', '.join(HEURISTICS)}")
    return HEURISTICS[name]
