"""The compact model in the form that compiled kernels take: a named tuple of arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.model.compact import Compact, Flags, Indices, Numbers
from lowtide.solve.model.ragged import inverse, ragged


class Tables(NamedTuple):
    """The columns of ``Compact``, see there. ``uses`` of a storage are the nodes that read it, ascending."""

    nodes: int
    boundary: int
    rng_state_bytes: int
    time_ns: Numbers
    workspace_bytes: Numbers
    reads_start: Indices
    reads: Indices
    owns_start: Indices
    owns: Indices
    needs_start: Indices
    needs: Indices
    overs_start: Indices  # node -> storages that it overwrites where they die there
    overs: Indices
    views_start: Indices
    views: Indices
    view_time_ns: Numbers
    view_storage: Indices  # view -> the storage it looks at, -1 where that is outside
    needers_start: Indices  # view -> the nodes that need it, ascending
    needers: Indices
    storage_bytes: Numbers
    storage_node: Indices
    uses_start: Indices
    uses: Indices
    gaps: Indices  # indices in reads, each as often as bytes x wait since the previous use ask for
    read_node: Indices  # index in reads -> node
    held: Flags
    overwritten: Flags  # storage -> whether a node writes over it where it dies
    recomputable: Flags
    random: Flags


def make_tables(model: Compact) -> Tables:
    uses_start, uses = inverse(model.reads_start, model.reads, len(model.storage_node))
    needers_start, needers = inverse(model.needs_start, model.needs, len(model.view_time_ns))
    overs_start, overs = ragged([model.at_times.get(node, ()) for node in range(model.nodes + 1)])
    return Tables(
        nodes=model.nodes,
        boundary=model.boundary,
        rng_state_bytes=model.rng_state_bytes,
        time_ns=model.time_ns,
        workspace_bytes=model.workspace_bytes,
        reads_start=model.reads_start,
        reads=model.reads,
        owns_start=model.owns_start,
        owns=model.owns,
        needs_start=model.needs_start,
        needs=model.needs,
        overs_start=overs_start,
        overs=overs,
        views_start=model.views_start,
        views=model.views,
        view_time_ns=model.view_time_ns,
        view_storage=_owners(model.views_start, model.views, len(model.view_time_ns)),
        needers_start=needers_start,
        needers=needers,
        storage_bytes=model.storage_bytes,
        storage_node=model.storage_node,
        uses_start=uses_start,
        uses=uses,
        gaps=_gaps(model),
        read_node=np.repeat(np.arange(model.nodes + 1, dtype=np.int32), np.diff(model.reads_start)),
        held=model.held,
        overwritten=np.isin(np.arange(len(model.storage_node)), overs),
        recomputable=model.recomputable,
        random=model.random,
    )


def _owners(start: Indices, entries: Indices, columns: int) -> Indices:
    """Entry -> the one row that it stands in, -1 without one."""
    owner = np.full(columns, -1, np.int32)
    owner[entries] = np.repeat(np.arange(len(start) - 1, dtype=np.int32), np.diff(start))
    return owner


def _gaps(model: Compact, size: int = 8192) -> Indices:
    """Reads drawn evenly by the root of bytes x nodes since the storage was last used: where recomputing may pay."""
    weights = np.zeros(len(model.reads))
    last = model.storage_node.astype(np.int64)
    for node in range(model.nodes + 1):
        for read in range(model.reads_start[node], model.reads_start[node + 1]):
            storage = model.reads[read]
            if model.recomputable[model.storage_node[storage]] and not model.held[storage]:
                weights[read] = np.sqrt(float(model.storage_bytes[storage]) * (node - last[storage] - 1))
            last[storage] = node
    total = weights.sum()
    if total == 0:
        return np.arange(len(weights), dtype=np.int32)
    return np.asarray(np.searchsorted(np.cumsum(weights), (np.arange(size) + 0.5) / size * total), np.int32)


def encode_keep_all(model: Compact) -> Indices:
    """The program as it is: every node once. A recompute of node ``x`` is written ``~x`` in such sequences."""
    return np.arange(model.nodes + 1, dtype=np.int32)


def decode(model: Compact, codes: Indices) -> list[int]:
    """Op ids of an encoded sequence, the end left out."""
    nodes = np.where(codes < 0, ~codes, codes)
    return model.sequence(nodes[nodes < model.nodes])
