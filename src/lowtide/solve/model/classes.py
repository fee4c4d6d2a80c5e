"""Find nodes at corresponding positions of repeated blocks, by colour refinement.

Two nodes are in one class if the graphs around them, up to three steps along reads and uses, agree in shape and bytes.
Times are ignored, as measured ones differ between repeats. Linear in the size of the graph per round.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Indices

_ROUNDS = 3


class Classes(NamedTuple):
    """Classes of nodes: node n is in class ``number[n]``; the nodes of class c are ``members[start[c]:start[c + 1]]``."""

    number: Indices
    start: Indices
    members: Indices


def node_classes(model: CompactGraph) -> Classes:
    """Return the classes of all nodes (the end included), numbered in order of appearance, with ascending nodes."""
    sources = [model.storage_node[model.reads_of(node)].tolist() for node in range(model.nodes + 1)]
    readers: list[list[int]] = [[] for _ in sources]
    for node, bases in enumerate(sources):
        for base in bases:
            readers[base].append(node)
    colours = _dense([_first_colour(model, node, len(sources[node])) for node in range(model.nodes + 1)])
    for _ in range(_ROUNDS):
        colours = _dense(
            [
                (
                    colours[node],
                    tuple(sorted(colours[source] for source in sources[node])),
                    tuple(sorted(colours[reader] for reader in readers[node])),
                )
                for node in range(model.nodes + 1)
            ]
        )
    number = np.array(colours, np.int32)
    start = np.concatenate([[0], np.cumsum(np.bincount(number))]).astype(np.int32)
    return Classes(number, start, np.argsort(number, kind="stable").astype(np.int32))


def _first_colour(model: CompactGraph, node: int, reads: int) -> tuple[int, ...]:
    owned = model.owns_of(node)
    return (
        reads,
        int(model.workspace_bytes[node]),
        int(node < model.boundary),
        int(model.recomputable[node]),
        *(int(size) for size in model.storage_bytes[owned]),
    )


def _dense(keys: list[tuple[object, ...]]) -> list[int]:
    numbers: dict[tuple[object, ...], int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
