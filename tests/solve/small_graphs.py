"""Random graphs of a few operators, with everything that makes liveness interesting."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from lowtide.ir import Costs, Graph, Op, Phase, Storage, Value, is_view


def small_graph(seed: int, ops: int = 6) -> tuple[Graph, Costs]:
    """A forward and backward graph with views, multi-output ops, random ops, effects and workspaces."""
    draw = random.Random(seed)
    values = [Value(0, "x", 0, None)]
    storages: list[tuple[int | None, list[int]]] = [(None, [0])]
    op_list: list[Op] = []
    forward_ops = draw.randint(1, ops - 1)
    for op_id in range(ops):
        recent = range(len(values))
        inputs = {draw.choice(recent), draw.choice(recent[-3:])} | (
            {draw.choice(recent)} if draw.random() < 0.3 else set()
        )
        kind = draw.random()
        view = kind < 0.15 and op_id > 0
        outputs = []
        for _ in range(2 if 0.15 <= kind < 0.35 else 1):
            value = len(values)
            if view:
                source = draw.choice(sorted(inputs))
                inputs = {source}
                storage = values[source].storage
            else:
                storage = len(storages)
                storages.append((op_id, []))
            storages[storage][1].append(value)
            values.append(Value(value, f"v{value}", storage, op_id))
            outputs.append(value)
        phase = Phase.FORWARD if op_id < forward_ops else Phase.BACKWARD
        is_random = not view and draw.random() < 0.15
        effect = not view and not is_random and draw.random() < 0.08
        op_list.append(
            Op(op_id, f"op{op_id}", "op", tuple(sorted(inputs)), tuple(outputs), phase, random=is_random, effect=effect)
        )
    produced = [v.id for v in values if v.producer is not None]
    forward = [v.id for v in values if v.producer is not None and v.producer < forward_ops]
    graph = Graph(
        name=f"small{seed}",
        ops=tuple(op_list),
        values=tuple(values),
        storages=tuple(Storage(i, base, tuple(inside)) for i, (base, inside) in enumerate(storages)),
        inputs=(0,),
        forward_outputs=(draw.choice(forward),) if draw.random() < 0.5 else (),
        outputs=tuple(sorted({produced[-1], draw.choice(produced)})),
        forward_ops=forward_ops,
        fixed_bytes=draw.choice((0, 3)),
    )
    return graph, small_costs(graph, draw)


def small_costs(graph: Graph, draw: random.Random) -> Costs:
    """Small integers, so that ties and exact fits are common."""
    return Costs(
        time_ns=np.array([draw.randint(1, 9) for _ in graph.ops]),
        workspace_bytes=np.array([0 if is_view(graph, op) else draw.choice((0, 0, 0, 2, 5)) for op in graph.ops]),
        storage_bytes=np.array([0 if s.external else draw.randint(1, 8) for s in graph.storages]),
        rng_state_bytes=1,
    )


def chain(length: int, *, size: int = 4, times: tuple[int, ...] = ()) -> tuple[Graph, Costs]:
    """``length`` forward ops in a row and as many backward ops, each reading its forward op's input and a gradient."""
    total = 2 * length
    op_list = []
    for i in range(total):
        mirror = total - 1 - i
        inputs = [i - 1] if i else []
        inputs += [mirror - 1] if i >= length and mirror > 0 else []
        phase = Phase.FORWARD if i < length else Phase.BACKWARD
        op_list.append(Op(i, f"op{i}", "op", tuple(sorted(set(inputs))), (i,), phase))
    graph = Graph(
        name=f"chain{length}",
        ops=tuple(op_list),
        values=tuple(Value(i, f"v{i}", i, i) for i in range(total)),
        storages=tuple(Storage(i, i, (i,)) for i in range(total)),
        inputs=(),
        forward_outputs=(),
        outputs=(total - 1,),
        forward_ops=length,
    )
    time_ns = np.array(times or (1,) * total)
    return graph, Costs(time_ns, np.zeros(total, np.int64), np.full(total, size))


def sharded(
    blocks: int, *, compute: int = 10, gather: int = 8, activation: int = 4, parameter: int = 3
) -> tuple[Graph, Costs]:
    """Every block gathers its parameter for its forward and its backward op, which makes a gradient that is then reduced."""
    ops: list[Op] = []
    producers: list[int] = []
    times, sizes, outputs = [], [], []

    def add(name: str, inputs: tuple[int, ...], forward: bool, time: int, size: int, collective: bool = False) -> int:
        phase = Phase.FORWARD if forward else Phase.BACKWARD
        ops.append(Op(len(ops), name, name, inputs, (len(producers),), phase, collective=collective))
        producers.append(len(ops) - 1)
        times.append(time)
        sizes.append(size)
        return len(producers) - 1

    parameters, activations = [], []
    for block in range(blocks):
        parameters.append(add(f"gather{block}", (), True, gather, parameter, True))
        before = (activations[-1],) if activations else ()
        activations.append(add(f"forward{block}", (parameters[-1], *before), True, compute, activation))
    forward_ops, gradient = len(ops), activations[-1]
    for block in reversed(range(blocks)):
        before = (activations[block - 1],) if block else ()
        backward = (parameters[block], gradient, *before)
        gradient = add(f"backward{block}", tuple(dict.fromkeys(backward)), False, 2 * compute, activation)
        outputs.append(add(f"reduce{block}", (gradient,), False, gather, 1, True))
        ops[-1] = replace(ops[-1], once=True)
    graph = Graph.of_results("sharded", ops, producers, outputs, forward_ops=forward_ops)
    return graph, Costs(np.array(times), np.zeros(len(ops)), np.array(sizes), collectives_beside=True)
