"""Random compute sequences: the program with storages dropped at random and rebuilt where they are next read."""

from __future__ import annotations

import random

from lowtide.ir import Graph, is_view


def random_sequence(graph: Graph, seed: int, drop: float = 0.3) -> list[int]:
    """A valid sequence of op ids with recomputation, deterministic for a seed."""
    return _Dropper(graph, random.Random(seed), drop).run()


class _Dropper:
    def __init__(self, graph: Graph, rng: random.Random, drop: float) -> None:
        self.graph, self.rng, self.drop = graph, rng, drop
        self.owned = graph.owned
        self.live: set[int] = set()
        self.sequence: list[int] = []
        mixed = {
            graph.values[v].storage for op in graph.ops for v in op.outputs if graph.values[v].storage not in self.owned[op.id]
            and not is_view(graph, op)
        }  # fmt: skip
        handed = {graph.values[value].storage for value in graph.forward_outputs}
        self.kept = mixed | handed

    def run(self) -> list[int]:
        for op in self.graph.ops:
            if is_view(self.graph, op):
                continue
            for storage in sorted(self.live):
                base = self.graph.storages[storage].base
                assert base is not None
                if storage not in self.kept and self.graph.ops[base].recomputable and self.rng.random() < self.drop:
                    self.live.discard(storage)
            self._run(op.id)
        for value in self.graph.outputs:
            self._rebuild(self.graph.values[value].storage)
        return self.sequence

    def _run(self, op_id: int) -> None:
        for value in self.graph.ops[op_id].inputs:
            self._rebuild(self.graph.values[value].storage)
        self.sequence.append(op_id)
        self.live.update(self.owned[op_id])

    def _rebuild(self, storage: int) -> None:
        base = self.graph.storages[storage].base
        if base is not None and storage not in self.live:
            self._run(base)
