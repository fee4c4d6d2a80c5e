"""The structure of a program: places to cut its forward pass, and the bytes that cross each cut. Linear time."""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Flags, Indices, Numbers


def articulation_points(model: CompactGraph, without: Flags | None = None) -> list[int]:
    """Return the forward nodes ``c``, ascending, such that later forward nodes read no storage of the nodes up to ``c`` other
    than those of ``c``.

    Ignores external storages, the storages ``without`` (by default those held for the caller), and reads by a node that runs
    only once and gives nothing to the forward pass (a buffer's update), as that is never recomputed. The last forward node is
    always an articulation point.
    """
    last = last_forward_use(model, updates=False)
    without = model.held if without is None else without
    furthest = -1  # last forward use of any storage allocated before the node
    points = []
    for node in range(model.boundary):
        if furthest <= node:
            points.append(node)
        for storage in model.owns_of(node):
            if not without[storage]:
                furthest = max(furthest, int(last[storage]))
    return points


def last_forward_use(model: CompactGraph, *, updates: bool = True) -> Numbers:
    """Return for every storage the last forward node that reads it, -1 if there is none.

    Without ``updates``, nodes that run only once and allocate nothing that forward nodes read are ignored.
    """
    last = np.full(len(model.storage_node), -1, np.int64)
    end = model.reads_start[model.boundary]
    storage, node = model.reads[:end], model.read_node[:end]
    if not updates:
        gives = np.zeros(model.nodes + 1, np.bool_)  # whether a forward node reads what the node allocates
        gives[model.storage_node[storage]] = True
        counted = model.recomputable[node] | gives[node]
        storage, node = storage[counted], node[counted]
    np.maximum.at(last, storage, node)
    return last


def crossing_bytes(model: CompactGraph) -> Numbers:
    """Return the bytes that cross the cut before each forward node, counting forward reads only."""
    last = last_forward_use(model)
    crossing = np.flatnonzero((model.storage_node < model.boundary) & (last > model.storage_node))
    return _levels(model.storage_node[crossing] + 1, last[crossing], model.storage_bytes[crossing], model.boundary + 1)


def resident_bytes(model: CompactGraph, counted: Flags | None = None) -> tuple[Numbers, Numbers]:
    """Return the bytes of the ``counted`` storages (default: all) without recomputation, right before each node (the end
    included), and while it runs, with its own results and workspace."""
    counted = np.ones(len(model.storage_node), np.bool_) if counted is None else counted
    last = model.storage_node.astype(np.int64)
    np.maximum.at(last, model.reads, model.read_node)
    last[model.held] = model.nodes
    node, size = model.storage_node[counted], model.storage_bytes[counted]
    before, own = _levels(node + 1, last[counted], size, model.nodes + 1), np.zeros(model.nodes + 1, np.int64)
    np.add.at(own, node, size)
    return before, before + own + model.workspace_bytes


def _levels(first: Numbers | Indices, last: Numbers, sizes: Numbers, count: int) -> Numbers:
    """Return for each of ``count`` places the sum of the sizes that are live from ``first`` to ``last``, both included."""
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last + 1, sizes)
    return np.cumsum(change)[:-1]


def even_cuts(model: CompactGraph, blocks: int, *, least_ns: int = 1) -> list[int]:
    """Cut the forward pass into about ``blocks`` blocks of equal time, each cut moved to where the fewest bytes cross.

    Returns the cuts from 0 to the boundary. A node counts at least ``least_ns``; there are fewer cuts if blocks would be empty.
    """
    crossing = crossing_bytes(model)
    elapsed = np.concatenate([[0], np.cumsum(np.maximum(model.time_ns[: model.boundary], least_ns))])
    cuts = [0]
    for block in range(1, blocks):
        low = max(int(np.searchsorted(elapsed, elapsed[-1] * (block - 0.4) / blocks)), cuts[-1] + 1)
        high = min(int(np.searchsorted(elapsed, elapsed[-1] * (block + 0.4) / blocks)), model.boundary - 1)
        if low <= high:
            cuts.append(low + int(np.argmin(crossing[low : high + 1])))
    return [*cuts, model.boundary]
