"""Orders in which calls can be made again within little memory, found by the planners of graphs.

A training step asks the same of every other one, so what was found is kept by the structure of what was asked: the calls,
what they read of each other, and sizes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from lowtide.dynamic.node import Node
from lowtide.dynamic.plan import Rematerialization

_KEPT = 1024  # structures
_NEAR = 0.95  # what was found for so much of the room is as good as what would be found for all of it

_Structure = tuple[tuple[tuple[int, ...], ...], ...]


class _Found(NamedTuple):
    """A sequence, its peak, and the room for which it was searched."""

    peak_bytes: int
    room_bytes: int
    sequence: tuple[int, ...]


class OrderCache:
    """Orders by the structure of what was asked."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Structure, list[_Found]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def within(
        self, room_bytes: int, calls: Sequence[Rematerialization], targets: Sequence[Node]
    ) -> list[Rematerialization]:
        """A sequence of ``calls``, which come in program order, some of them several times.

        Of the lowest peak that was found where none was found within ``room_bytes``.
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
    """Of each call: its scratch, the places of what it reads, the sizes of what it makes. Last, the places of the targets."""
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
