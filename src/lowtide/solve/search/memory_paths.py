"""Shortest path over memory states that are full: the exact search that settles what ``checkmate``'s programs leave open, and
graphs of a few dozen nodes altogether, for ``auto`` and for what searches are measured against.

A state is (next first compute, live storages, formed views, kept generator states). Edges compute one node. Nothing is
freed before room is needed: an edge frees a smallest set of storages and states that makes its node fit (no part of it
would do), and one edge leads out for every such set; another one where the node may write over what it reads, which is gone
then. What no later compute can read is dropped at once. Complete, because a free may always be put off until the compute
that needs its room. A state that has no more than another of the same frontier which was reached in no more time is dropped.
The algorithm is A*, on the recompute time and what is left at least: whatever is gone and will be read has to be computed
again. So only states are looked at that can still be quicker than the best schedule known. Compiled:
``native/memory_paths.cpp``.

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

MAX_NODES = MAX_STORAGES = 60  # of graphs that are solved exactly, where that does not take too long
MAX_STATES = 10_000  # for that: up to some tenths of a second
_MAX_PEAK_STATES = 4 * MAX_STATES  # for each budget that is tried for the least: what finds it by trying takes seconds
_EDGES, _COMPARISONS = 15, 2_000  # the most of them, by state
_NEVER = 1 << 62  # nanoseconds


class PathQuestion(NamedTuple):
    """What ``core.memory_path`` is asked: ``native/memory_paths.hpp`` has what the fields mean."""

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
    """``nodes`` in the order in which they are computed; empty where there is no path (``found`` false). ``time_ns``: of the
    whole schedule."""

    found: bool
    nodes: tuple[int, ...] = ()
    time_ns: int = 0


def affordable(model: CompactGraph) -> bool:
    """Whether ``shortest`` and ``least_peak`` may come to an end."""
    return model.nodes <= MAX_NODES and len(model.storage_node) <= MAX_STORAGES


def shortest(model: CompactGraph, budget_bytes: int) -> Path | None:
    """The quickest path within the budget; ``None`` where there are too many states."""
    return cheapest_path(model, budget_bytes, states=MAX_STATES)


def least_peak(model: CompactGraph) -> int | None:
    """The smallest budget that has a path; ``None`` where there are too many states."""
    unit = max(math.gcd(*model.storage_bytes.tolist(), *model.workspace_bytes.tolist(), model.rng_state_bytes), 1)
    low, high = 0, sweep(model, encode_keep_all(model)).peak_bytes // unit
    while low < high:
        middle = (low + high) // 2
        path = cheapest_path(model, model.fixed_bytes + middle * unit, states=_MAX_PEAK_STATES, any_path=True)
        if path is None:
            return None
        if path.found:
            high = middle
            if not model.overs.size:  # else it depends on the schedule what is written over, and the sweep may see less
                codes = encode(model, model.op_of_node[[*path.nodes]].tolist())
                high = min(middle, sweep(model, codes).peak_bytes // unit)
        else:
            low = middle + 1
    return model.fixed_bytes + low * unit


def cheapest_path(
    model: CompactGraph, budget_bytes: int, below_ns: float = math.inf, states: int = 4_000, any_path: bool = False
) -> Path | None:
    """The quickest path within the budget if it takes less than ``below_ns``.

    ``any_path``: some path, looked for depth first. ``None``: given up, after ``states`` states or as much other work.
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
