"""Random training graphs for tests: deterministic for a seed, with every feature that a graph can have."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from lowtide.ir.costs import Costs
from lowtide.ir.graph import TANGENT_TARGET, Graph, Op, Phase, Storage, Value


def random_graph(
    seed: int,
    ops: int,
    *,
    views: bool = True,
    multi_output: bool = True,
    random_ops: bool = True,
    forward_backward: bool = True,
) -> tuple[Graph, Costs]:
    """A graph of exactly ``ops`` ops with its costs.

    With ``forward_backward`` (needs at least 3 ops) the second half is a backward pass that reads the first half in
    roughly reverse order and starts with the tangent of the last forward value; without it, everything is a forward
    pass and nothing is handed over. Features beyond the flags: external inputs, effects, collectives, dead ops,
    workspaces, storages of 0 bytes.
    """
    return _Maker(random.Random(f"{seed}/{ops}"), views, multi_output, random_ops).graph(seed, ops, forward_backward)


@dataclass
class _Maker:
    rng: random.Random
    views: bool
    multi_output: bool
    random_ops: bool
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    bases: list[int | None] = field(default_factory=list)
    forward_ops: int = 0

    def graph(self, seed: int, count: int, forward_backward: bool) -> tuple[Graph, Costs]:
        split = forward_backward and count >= 3
        self.forward_ops = max(1, count // 2) if split else count
        inputs = tuple(self._value(None, self._storage(None)) for _ in range(self.rng.randint(1, 2)))
        while len(self.ops) < self.forward_ops:
            self._op(self._recent(inputs, self._made(0)))
        forward_outputs = self._handed_over() if split else ()
        if split:
            self._append(TANGENT_TARGET, (), [self._storage(len(self.ops))], effect=True)
            self._backward(count)
        first = self.forward_ops if split else 0
        return self._finished(f"random-{seed}", inputs, forward_outputs, self._results(first))

    def _backward(self, count: int) -> None:
        forward = self._made(0)
        while len(self.ops) < count:
            gradients = self._made(self.forward_ops)
            done = (len(self.ops) - self.forward_ops) / max(1, count - self.forward_ops)
            mirror = forward[int((1 - done) * (len(forward) - 1))]
            self._op([self.rng.choice(gradients[-2:]), mirror, *self.rng.sample(forward, min(1, len(forward)))])

    def _op(self, candidates: list[int]) -> None:
        """Append an op of a random kind that reads some of ``candidates``."""
        kind = self.rng.random()
        if self.views and kind < 0.2:
            source = self.rng.choice(candidates)
            self._append("view", (source,), storages=[self.values[source].storage] * self.rng.choice((1, 1, 2)))
        elif kind < 0.25:
            self._append("effect", (self.rng.choice(candidates),), storages=[], effect=True)
        else:
            reads = self.rng.sample(candidates, min(len(candidates), self.rng.choice((1, 1, 2, 2, 3))))
            fresh = self.rng.choice((1, 1, 2, 3)) if self.multi_output else 1
            storages = [self._storage(len(self.ops)) for _ in range(fresh)]
            if self.multi_output and self.views and self.rng.random() < 0.1:
                storages.append(storages[0])
            self._append(
                "random" if (is_random := self.random_ops and self.rng.random() < 0.2) else "op",
                tuple(dict.fromkeys(reads)),
                storages,
                random=is_random,
                collective=self.rng.random() < 0.03,
            )

    def _append(self, target: str, inputs: tuple[int, ...], storages: list[int], **flags: bool) -> None:
        op_id = len(self.ops)
        phase = Phase.FORWARD if op_id < self.forward_ops else Phase.BACKWARD
        outputs = tuple(self._value(op_id, storage) for storage in storages)
        self.ops.append(Op(op_id, f"{target.split('.')[-1]}_{op_id}", target, inputs, outputs, phase, **flags))

    def _storage(self, base: int | None) -> int:
        self.bases.append(base)
        return len(self.bases) - 1

    def _value(self, producer: int | None, storage: int) -> int:
        self.values.append(Value(len(self.values), f"v{len(self.values)}", storage, producer, "float32", (2, 3)))
        return len(self.values) - 1

    def _made(self, first_op: int) -> list[int]:
        """Values that ops from ``first_op`` on return; at least the graph's inputs."""
        made = [v.id for v in self.values if v.producer is not None and v.producer >= first_op]
        return made or [v.id for v in self.values if v.producer is None]

    def _recent(self, inputs: tuple[int, ...], made: list[int]) -> list[int]:
        """Mostly the last few values, sometimes anything."""
        pool = made[-4:] if self.rng.random() < 0.8 else made
        return [*pool, self.rng.choice(inputs)]

    def _handed_over(self) -> tuple[int, ...]:
        made = self._made(0)
        return tuple(dict.fromkeys((made[-1], *self.rng.sample(made, min(len(made), self.rng.choice((0, 0, 1)))))))

    def _results(self, first_op: int) -> tuple[int, ...]:
        made = self._made(first_op)
        return tuple(sorted({made[-1], *self.rng.sample(made, min(len(made), self.rng.randint(0, 2)))}))

    def _finished(
        self, name: str, inputs: tuple[int, ...], forward_outputs: tuple[int, ...], outputs: tuple[int, ...]
    ) -> tuple[Graph, Costs]:
        members: list[list[int]] = [[] for _ in self.bases]
        for value in self.values:
            members[value.storage].append(value.id)
        storages = tuple(Storage(i, base, tuple(members[i])) for i, base in enumerate(self.bases))
        fixed_bytes = self.rng.choice((0, 0, 7))
        graph = Graph(
            name,
            tuple(self.ops),
            tuple(self.values),
            storages,
            inputs,
            forward_outputs,
            outputs,
            self.forward_ops,
            fixed_bytes,
        )
        return graph, self._costs(graph)

    def _costs(self, graph: Graph) -> Costs:
        def number(low: int, high: int) -> int:
            return self.rng.randint(low, high)

        free = [op.target in (TANGENT_TARGET, "view") for op in graph.ops]
        return Costs(
            np.array([0 if is_free else number(1, 20) for is_free in free], dtype=np.int64),
            np.array([0 if is_free else self.rng.choice((0, 0, number(1, 10))) for is_free in free], dtype=np.int64),
            np.array(
                [0 if s.external else self.rng.choice((0, *[number(1, 20)] * 9)) for s in graph.storages],
                dtype=np.int64,
            ),
            rng_state_bytes=3 if self.random_ops else 0,
            device="random",
        )
