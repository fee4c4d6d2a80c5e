"""The canonical schedule of a sequence: where views, frees, generator states and the boundary go."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lowtide.ir import (
    Compute,
    Graph,
    Op,
    Phase,
    Storage,
    Value,
    check,
    format_schedule,
    is_view,
    keep_all_schedule,
    schedule_from_sequence,
    simulate,
)
from tests.support.interpreter import Machine
from tests.support.random_graphs import random_graph
from tests.support.wide import seeds


def _graph(ops: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, bool]]], storage_of: list[int]) -> Graph:
    """Ops as (inputs, outputs, flags); the last op is the backward pass and returns the output."""
    producer = {value: op for op, (_, outputs, _) in enumerate(ops) for value in outputs}
    values = tuple(Value(v, f"v{v}", s, producer[v]) for v, s in enumerate(storage_of))
    members = [tuple(v for v, s in enumerate(storage_of) if s == storage) for storage in range(max(storage_of) + 1)]
    phases = [Phase.FORWARD] * (len(ops) - 1) + [Phase.BACKWARD]
    return Graph(
        name="small",
        ops=tuple(Op(i, f"op{i}", "op", ops[i][0], ops[i][1], phases[i], **ops[i][2]) for i in range(len(ops))),
        values=values,
        storages=tuple(Storage(i, producer[m[0]], m) for i, m in enumerate(members)),
        inputs=(),
        forward_outputs=(),
        outputs=ops[-1][1],
        forward_ops=len(ops) - 1,
    )


_VIEWED = _graph(
    [((), (0,), {}), ((0,), (1,), {}), ((1,), (2,), {}), ((2, 1), (3,), {})], [0, 0, 1, 2]
)  # op1 views op0's storage


def _steps(graph: Graph, sequence: list[int]) -> str:
    schedule = schedule_from_sequence(graph, sequence)
    check(graph, schedule)
    return format_schedule(schedule).strip().replace("\n", "; ")


def test_a_view_is_formed_again_for_each_life_of_its_storage() -> None:
    assert _steps(_VIEWED, [0, 1, 2, 3]) == ("compute 0; compute 1; compute 2; |; compute 3; free s1; free s0")
    assert _steps(_VIEWED, [0, 2, 0, 3]) == (
        "compute 0; compute 1; compute 2; free s0; |; compute 0; compute 1; compute 3; free s1; free s0"
    )


def test_recomputes_that_nobody_uses_are_dropped() -> None:
    assert _steps(_VIEWED, [0, 2, 0, 0, 3, 2, 0]) == _steps(_VIEWED, [0, 2, 0, 3])


def test_dead_ops_go_and_effects_stay() -> None:
    dead = _graph([((), (0,), {}), ((), (1,), {}), ((), (2,), {"effect": True}), ((0,), (3,), {})], [0, 1, 2, 3])
    assert _steps(dead, [0, 1, 2, 3]) == "compute 0; compute 2; free s2; |; compute 3; free s0"


def test_generator_states_only_where_a_random_op_runs_again() -> None:
    draws = _graph([((), (0,), {"random": True}), ((0,), (1,), {}), ((0, 1), (2,), {})], [0, 1, 2])
    assert _steps(draws, [0, 1, 2]) == "compute 0; compute 1; |; compute 2; free s0; free s1"
    assert _steps(draws, [0, 1, 0, 2]) == (
        "save_rng 0; compute 0; compute 1; free s0; |; restore_rng 0; compute 0; compute 2; free s0; free s1"
    )


def test_a_storage_into_which_another_op_puts_a_value_is_not_renewed() -> None:
    """op1 allocates storage 1 and also returns a value in op0's storage, which a renewal would lose."""
    mixed = _graph([((), (0,), {}), ((0,), (1, 2), {}), ((1,), (3,), {}), ((3, 2), (4,), {})], [0, 1, 0, 2, 3])
    kept = "compute 0; compute 1; compute 2; free s1; |; compute 3; free s2; free s0"
    for sequence in ([0, 1, 2, 3], [0, 1, 2, 0, 3], [0, 1, 2, 0, 1, 3], [0, 1, 2, 1, 3]):
        assert _steps(mixed, sequence) == kept


def test_a_collective_that_returns_its_input_is_not_a_view() -> None:
    ops = [*_VIEWED.ops]
    ops[1] = dataclasses.replace(ops[1], collective=True)
    waiting = dataclasses.replace(_VIEWED, ops=tuple(ops))
    assert is_view(_VIEWED, _VIEWED.ops[1])
    assert not is_view(waiting, waiting.ops[1])
    assert _steps(waiting, [0, 1, 2, 0, 3]).count("compute 1") == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("seed", seeds(20, 80))
def test_recomputes_anywhere_make_a_valid_schedule(seed: int, mixed: bool) -> None:
    """Liveness follows the sequence, so whatever may run again may do so at any later point."""
    rng = random.Random(seed)
    graph, costs = random_graph(seed, 5 + seed % 20)
    graph = _with_values_in_foreign_storages(graph, rng) if mixed else graph
    results = set()
    for sequence in ([op.id for op in graph.ops], _with_recomputes(graph, rng), _with_recomputes(graph, rng)):
        schedule = schedule_from_sequence(graph, sequence)
        check(graph, schedule)
        machine = Machine(graph, costs).run(schedule)
        assert simulate(graph, costs, schedule).timeline.tolist() == machine.timeline
        results.add((tuple(machine.values[v] for v in graph.outputs), tuple(machine.effects), machine.generator))
    assert len(results) == 1


def _with_recomputes(graph: Graph, rng: random.Random) -> list[int]:
    sequence: list[int] = []
    for op in graph.ops:
        earlier = [o.id for o in graph.ops[: op.id] if o.recomputable]
        sequence += [rng.choice(earlier) for _ in range(rng.randint(0, 2)) if earlier]
        sequence.append(op.id)
    return sequence


def _with_values_in_foreign_storages(graph: Graph, rng: random.Random) -> Graph:
    """The graph with one more value of some ops that allocate, in the storage of an input; some later op reads it."""
    ops, values, storages = list(graph.ops), list(graph.values), list(graph.storages)
    for op in graph.ops:
        inside = [values[v].storage for v in op.inputs if not storages[values[v].storage].external]
        if not inside or is_view(graph, op) or op.effect or rng.random() < 0.5:
            continue
        value = Value(len(values), f"mixed{op.id}", inside[0], op.id)
        values.append(value)
        storages[inside[0]] = dataclasses.replace(storages[inside[0]], values=(*storages[inside[0]].values, value.id))
        ops[op.id] = dataclasses.replace(ops[op.id], outputs=(*ops[op.id].outputs, value.id))
        reader = rng.randrange(op.id, len(ops))
        if reader > op.id and ops[reader].inputs and not is_view(graph, ops[reader]):
            ops[reader] = dataclasses.replace(ops[reader], inputs=(*ops[reader].inputs, value.id))
    return dataclasses.replace(graph, ops=tuple(ops), values=tuple(values), storages=tuple(storages))


def test_keeping_everything_runs_every_needed_op_once() -> None:
    for seed in range(30):
        graph, costs = random_graph(seed, 20)
        computes = [step.op for step in keep_all_schedule(graph).steps if isinstance(step, Compute)]
        assert len(computes) == len(set(computes))
        assert simulate(graph, costs, keep_all_schedule(graph)).time_ns <= costs.total_time_ns
