"""The optimum of graphs of a few nodes: what the searches are measured against, and what ``auto`` uses where it is affordable.

The least time within a budget is the cheapest path over full memory states (``memory_paths``); the least peak is the
smallest budget that has a path, found by halving. ``None`` where the limit of states is passed.
"""

from __future__ import annotations

from typing import NamedTuple

from lowtide.solve.model.compact import CompactGraph, encode_keep_all
from lowtide.solve.model.sweep import sweep
from lowtide.solve.search.memory_paths import cheapest_path

MAX_NODES = 9
MAX_STORAGES = 12
MAX_STATES = 30_000


class Optimum(NamedTuple):
    """``nodes`` is empty where no sequence fits (``feasible`` false). ``peak_bytes``: the budget for which it is asked, or the
    least peak."""

    feasible: bool
    nodes: tuple[int, ...]
    time_ns: int
    peak_bytes: int


def affordable(model: CompactGraph) -> bool:
    return model.nodes <= MAX_NODES and len(model.storage_node) <= MAX_STORAGES


def shortest(model: CompactGraph, budget_bytes: int | None) -> Optimum | None:
    """The least time within the budget; with ``None`` within the least peak. ``None`` where there are too many states."""
    budget_bytes = _least_peak(model) if budget_bytes is None else budget_bytes
    path = None if budget_bytes is None else cheapest_path(model, budget_bytes, states=MAX_STATES)
    if path is None or budget_bytes is None:
        return None
    return Optimum(path.found, path.nodes, model.least_ns + path.recompute_ns, budget_bytes)


def _least_peak(model: CompactGraph) -> int | None:
    low, high = model.fixed_bytes, model.fixed_bytes + sweep(model, encode_keep_all(model)).peak_bytes
    while low < high:
        middle = (low + high) // 2
        path = cheapest_path(model, middle, states=MAX_STATES, any_path=True)
        if path is None:
            return None
        low, high = (low, middle) if path.found else (middle + 1, high)
    return low
