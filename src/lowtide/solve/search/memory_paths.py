"""Exact search: the shortest path over memory states. Settles the cases that ``checkmate``'s programs leave open, and solves
graphs of a few dozen nodes for ``auto`` and as references for other searches.

A state is (next first compute, live storages, formed views, kept generator states). Each edge computes one node. Nothing is
freed before its memory is needed: an edge frees a minimal set of storages and generator states that makes its node fit, and
there is one edge per such set, and another one if the node may overwrite an input, which is then gone. Storages that no later
compute can read are dropped at once. Complete, because a free can always be delayed until the compute that needs its room. A
state is dropped if another state of the same frontier holds at least as much and was reached in no more time. The algorithm
is A* on the recompute time, with the estimate that everything that is gone and will be read must be recomputed. So only
states are visited that can still be quicker than the best schedule known. Compiled: ``native/memory_paths.cpp``.

Exact for order-preserving schedules with recomputation anywhere, on the compact model. Exponential in the worst case:
``None`` where more than ``states`` are met. The least peak is the smallest budget that has a path, found by halving.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices, encode, encode_keep_all
from lowtide.solve.model.reach import reach
from lowtide.solve.model.sweep import sweep

MAX_NODES = MAX_STORAGES = 60  # of graphs for which the exact search is tried
MAX_STATES = 10_000  # visited in it at most: up to some tenths of a second
_MAX_PEAK_STATES = 4 * MAX_STATES  # for each budget tried in ``least_peak``, as the other search for it takes seconds
_EDGES, _COMPARISONS = 15, 2_000  # the most, per state
_NEVER = 1 << 62  # nanoseconds


class PathQuestion(NamedTuple):
    """The arguments of ``core.memory_path``; ``native/memory_paths.hpp`` explains the fields."""

    room: int
    below_ns: int
    any_path: bool
    states: int
    edges: int
    comparisons: int
    node_until: Indices
    storage_until: Indices


@dataclass(frozen=True, slots=True)
class Path:
    """The result of the search: ``nodes`` in the order in which they are computed, empty if there is no path (``found`` is
    false). ``time_ns``: time of the whole schedule."""

    found: bool
    nodes: tuple[int, ...] = ()
    time_ns: int = 0


def affordable(model: CompactGraph) -> bool:
    """Whether the graph is small enough for ``shortest`` and ``least_peak``, which may still give up."""
    return model.nodes <= MAX_NODES and len(model.storage_node) <= MAX_STORAGES


def shortest(model: CompactGraph, budget_bytes: int) -> Path | None:
    """Return the quickest path within the budget; ``None`` if there are too many states."""
    return cheapest_path(model, budget_bytes, states=MAX_STATES)


def least_peak(model: CompactGraph) -> int | None:
    """Return the smallest budget that has a path; ``None`` if there are too many states."""
    unit = max(math.gcd(*model.storage_bytes.tolist(), *model.workspace_bytes.tolist(), model.rng_state_bytes), 1)
    low, high = 0, sweep(model, encode_keep_all(model)).peak_bytes // unit
    while low < high:
        middle = (low + high) // 2
        path = cheapest_path(model, model.fixed_bytes + middle * unit, states=_MAX_PEAK_STATES, any_path=True)
        if path is None:
            return None
        if path.found:
            high = middle
            if not model.overs.size:  # else the sweep may count less: overwriting depends on the schedule
                codes = encode(model, model.op_of_node[[*path.nodes]].tolist())
                high = min(middle, sweep(model, codes).peak_bytes // unit)
        else:
            low = middle + 1
    return model.fixed_bytes + low * unit


def cheapest_path(
    model: CompactGraph, budget_bytes: int, below_ns: float = math.inf, states: int = 4_000, any_path: bool = False
) -> Path | None:
    """Return the quickest path within the budget if it takes less than ``below_ns``.

    ``any_path``: return any path, searched depth first. ``None``: gave up after ``states`` states or as much other work.
    """
    tables = reach(model)
    question = PathQuestion(
        room=budget_bytes - model.fixed_bytes,
        below_ns=int(min(below_ns - model.least_ns, _NEVER)),
        any_path=any_path,
        states=states,
        edges=_EDGES * states,
        comparisons=_COMPARISONS * states,
        node_until=np.array(tables.node_until, np.int32),
        storage_until=np.array(tables.storage_until, np.int32),
    )
    path = core.memory_path(model, question)
    if path is None:
        return None
    found, nodes, recompute_ns = path
    return Path(True, tuple(nodes.tolist()), model.least_ns + recompute_ns) if found else Path(False)
