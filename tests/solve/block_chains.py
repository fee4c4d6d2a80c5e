"""Chains of blocks as graphs, and the best memory-persistent schedule of one, found apart from ``lowtide.solve``."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import numpy as np

from lowtide.ir import Costs, Graph, Op, Phase, Storage, Value


@dataclass(frozen=True, slots=True)
class BlockChain:
    """Block ``i`` turns x_i into a_i and that into x_{i+1}; its backward node reads x_i, a_i and g_{i+1} and
    gives g_i. The first backward node reads the last output in place of a gradient. Bytes and times by block; ``x[0]``
    is the program's input, which costs nothing.
    """

    x: tuple[int, ...]
    a: tuple[int, ...]
    g: tuple[int, ...]
    inner_ns: tuple[int, ...]
    outer_ns: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.a)

    def graph(self) -> tuple[Graph, Costs]:
        blocks, total = self.blocks, 3 * self.blocks
        ops = []
        for i in range(blocks):
            source = (2 * i - 1,) if i else ()
            ops.append(Op(2 * i, f"a{i}", "op", source, (2 * i,), Phase.FORWARD))
            ops.append(Op(2 * i + 1, f"x{i + 1}", "op", (2 * i,), (2 * i + 1,), Phase.FORWARD))
        for i in range(blocks - 1, -1, -1):
            op = 3 * blocks - 1 - i
            reads = {2 * i} | ({2 * i - 1} if i else set()) | {op - 1}
            ops.append(Op(op, f"g{i}", "op", tuple(sorted(reads)), (op,), Phase.BACKWARD))
        sizes = [size for i in range(blocks) for size in (self.a[i], self.x[i + 1])] + [*reversed(self.g[:blocks])]
        times = [time for i in range(blocks) for time in (self.inner_ns[i], self.outer_ns[i])] + [1] * blocks
        graph = Graph(
            name="blocks",
            ops=tuple(ops),
            values=tuple(Value(i, f"v{i}", i, i) for i in range(total)),
            storages=tuple(Storage(i, i, (i,)) for i in range(total)),
            inputs=(),
            forward_outputs=(),
            outputs=(total - 1,),
            forward_ops=2 * blocks,
        )
        return graph, Costs(np.array(times), np.zeros(total, np.int64), np.array(sizes))

    def cuts(self) -> list[int]:
        return [2 * i for i in range(self.blocks + 1)]


def draw_chain(seed: int, blocks: int) -> BlockChain:
    draw = random.Random(seed)

    def some(count: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randint(1, most) for _ in range(count))

    return BlockChain((0, *some(blocks, 4)), some(blocks, 8), (*some(blocks, 3), 0), some(blocks, 9), some(blocks, 9))


def best_persistent_ns(chain: BlockChain, budget: int) -> int | None:
    """Least forward time, re-runs included, of the schedules in which what is stored stays until its backward node.

    A state is the current block input, the stored inputs, the saved blocks and the next backward block.
    """
    blocks = chain.blocks
    start = (0, frozenset({0}), frozenset[int](), blocks - 1)
    best = {start: 0}
    queue = [(0, 0, start)]
    ticket = 0
    while queue:
        time, _, state = heapq.heappop(queue)
        if state[3] < 0:
            return time
        if best[state] < time:
            continue
        for after, cost in _moves(chain, state, budget):
            if time + cost < best.get(after, 2**60):
                best[after] = time + cost
                ticket += 1
                heapq.heappush(queue, (time + cost, ticket, after))
    return None


State = tuple[int, frozenset[int], frozenset[int], int]


def _moves(chain: BlockChain, state: State, budget: int) -> list[tuple[State, int]]:
    at, inputs, saved, following = state
    gradient = chain.g[following + 1] if following + 1 < chain.blocks else 0
    held = sum(chain.x[i] for i in inputs) + sum(chain.a[i] for i in saved) + gradient
    held += chain.x[chain.blocks] if chain.blocks - 1 in saved else 0
    moves: list[tuple[State, int]] = []
    if following in saved:
        if held + chain.g[following] <= budget:
            moves.append(((-1, inputs - {following}, saved - {following}, following - 1), 0))
        return moves
    if at < 0:
        return [((i, inputs, saved, following), 0) for i in inputs]
    moves.append(((at, inputs | {at}, saved, following), 0))
    during = held + (0 if at in inputs else chain.x[at]) + chain.a[at] + chain.x[at + 1]
    cost = chain.inner_ns[at] + chain.outer_ns[at]
    if during <= budget:
        if at < following:
            moves.append(((at + 1, inputs, saved, following), cost))
        if at in inputs:
            kept = inputs | {at + 1} if at < following else inputs
            moves.append(((at + 1, kept, saved | {at}, following), cost))
    return moves
