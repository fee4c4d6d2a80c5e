"""Searches for orders of calls that rebuild storages within little memory, by the planners for graphs.

Training steps repeat the same rebuilds, so orders are cached by the structure of the request: the calls, which results they
read of each other, and sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lowtide.dynamic.node import Node
from lowtide.dynamic.plan import Rematerialization

_KEPT = 1024  # structures
_NEAR = 0.95  # an order found for this share of the room is reused without a new search

_Structure = tuple[tuple[tuple[int, ...], ...], ...]


class _Found(NamedTuple):
    """A found sequence, its peak, and the room it was searched for."""

    peak_bytes: int
    room_bytes: int
    sequence: tuple[int, ...]


class OrderCache:
    """Cache of found orders by the structure of the request."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Structure, list[_Found]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def within(
        self, room_bytes: int, calls: Sequence[Rematerialization], targets: Sequence[Node]
    ) -> list[Rematerialization]:
        """Return a sequence of ``calls`` (given in program order), possibly with repetitions, that fits ``room_bytes``.

        If none is found that fits, returns the one with the lowest peak.
        """
        structure = _structure(calls, targets)
        known = self._known.setdefault(structure, [])
        self._known.move_to_end(structure)
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        searched = max((found.room_bytes for found in known if found.peak_bytes <= room_bytes), default=-1)
        failed = max((found.room_bytes for found in known if found.peak_bytes > found.room_bytes), default=-1)
        if searched < _NEAR * room_bytes and room_bytes > failed:
            known.append(_search(structure, [call.cost_ns for call in calls], room_bytes))
        fitting = [found for found in known if found.peak_bytes <= room_bytes]
        chosen = min(fitting or known, key=lambda found: len(found.sequence) if fitting else found.peak_bytes)
        return [calls[index] for index in chosen.sequence]


def _structure(calls: Sequence[Rematerialization], targets: Sequence[Node]) -> _Structure:
    """Return the cache key: per call its scratch, the indices of its inputs and sizes of its results; last, the targets'."""
    place = {node: number for number, node in enumerate(node for call in calls for node in call.makes)}
    rows = [
        (
            (call.scratch_bytes + call.bytes - sum(node.size_bytes for node in call.makes),),
            tuple(place[node] for node in call.reads),
            tuple(node.size_bytes for node in call.makes),
        )
        for call in calls
    ]
    return (*rows, (tuple(place[node] for node in targets),))


def _search(structure: _Structure, costs_ns: Sequence[int], room_bytes: int) -> _Found:
    import numpy as np

    from lowtide.ir import Costs, Graph, Op, Phase
    from lowtide.solve.minimum import sequence_within

    *rows, (outputs,) = structure
    ops, sizes, producers = [], list[int](), list[int]()
    for index, (_, reads, made) in enumerate(rows):
        results = tuple(range(len(sizes), len(sizes) + len(made)))
        ops.append(Op(index, f"call_{index}", "call", reads, results, Phase.FORWARD))
        sizes += made
        producers += [index] * len(made)
    graph = Graph.of_results("rebuild", ops, producers, outputs)
    costs = Costs(np.maximum(costs_ns, 1), np.array([scratch for (scratch,), _, _ in rows]), np.array(sizes))
    peak_bytes, sequence = sequence_within(graph, costs, room_bytes)
    return _Found(peak_bytes, room_bytes, sequence)
