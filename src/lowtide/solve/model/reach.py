"""The last stage at which recomputing a node, or keeping a storage, can matter: limits the variables of integer programs."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.ragged import rows


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Lists per node and per storage, and the last stage at which each can matter (-1: never after its first compute)."""

    reads: list[list[int]]
    owns: list[list[int]]
    needs: list[list[int]]
    readers: list[list[int]]
    base: list[int]
    node_until: list[int]
    storage_until: list[int]


def reach(model: CompactGraph) -> Reach:
    """Compute the ``Reach`` of a model, in time linear in the number of reads."""
    reads, owns = rows(model.reads_start, model.reads), rows(model.owns_start, model.owns)
    needs, readers = rows(model.needs_start, model.needs), rows(model.uses_start, model.uses)
    node_until = [-1] * (model.nodes + 1)
    storage_until = [-1] * len(readers)
    for node in range(model.nodes, -1, -1):
        for storage in owns[node]:
            uses = [max(reader, node_until[reader]) for reader in readers[storage]]
            storage_until[storage] = model.nodes if model.handed[storage] else max(uses, default=-1)
            if model.recomputable[node] and not model.held[storage]:
                last = min(storage_until[storage], model.boundary) if model.handed[storage] else storage_until[storage]
                node_until[node] = max(node_until[node], last)
    return Reach(reads, owns, needs, readers, model.storage_node.tolist(), node_until, storage_until)


def recompute_columns(model: CompactGraph, reduced: bool) -> int:
    """Return the number of variables R[t, i] that a formulation has, without building it."""
    until = reach(model).node_until
    first = [max(node, model.boundary - 1) if reduced else node for node in range(model.nodes)]
    return sum(max(until[node] - first[node], 0) for node in range(model.nodes))
