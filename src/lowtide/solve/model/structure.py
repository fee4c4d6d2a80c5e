"""The shape of a program: where its forward pass can be cut, and what crosses each cut. Linear time."""

from __future__ import annotations

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Numbers


def articulation_points(model: CompactGraph) -> list[int]:
    """Forward nodes ``c``, ascending, such that of what the nodes up to ``c`` allocate, later forward nodes read
    storages of ``c`` only.

    Neither external storages count nor those handed to the caller, which stay in any case, nor reads by a node that
    runs once only and gives nothing to the forward pass (a buffer's update), as nobody will recompute it. The last
    forward node is always one.
    """
    last = last_forward_use(model, updates=False)
    furthest = -1  # last forward use of any storage allocated before the node
    points = []
    for node in range(model.boundary):
        if furthest <= node:
            points.append(node)
        for storage in model.owns_of(node):
            if not model.held[storage]:
                furthest = max(furthest, int(last[storage]))
    return points


def last_forward_use(model: CompactGraph, *, updates: bool = True) -> Numbers:
    """Per storage the last forward node that reads it, -1 where there is none.

    Without ``updates``, nodes that run once only and allocate nothing that forward nodes read are passed over.
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
    """Bytes that cross the cut before each forward node, counting forward reads only."""
    last = last_forward_use(model)
    crossing = np.flatnonzero((model.storage_node < model.boundary) & (last > model.storage_node))
    change = np.zeros(model.boundary + 2, np.int64)
    np.add.at(change, model.storage_node[crossing] + 1, model.storage_bytes[crossing])
    np.subtract.at(change, last[crossing] + 1, model.storage_bytes[crossing])
    return np.cumsum(change)[: model.boundary + 1]


def even_cuts(model: CompactGraph, blocks: int, *, least_ns: int = 1) -> list[int]:
    """About ``blocks`` blocks ``0 .. boundary`` of even time, each cut moved to where the fewest bytes cross.

    A node counts ``least_ns`` at least; there are fewer cuts where blocks would be empty.
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
