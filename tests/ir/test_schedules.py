"""Sequence to schedule, simulator and checker against an interpreter that runs schedules on real memory."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from lowtide.errors import ScheduleError
from lowtide.ir import (
    Compute,
    Costs,
    Free,
    Graph,
    Op,
    Phase,
    RestoreRng,
    SaveRng,
    Schedule,
    Storage,
    Value,
    check,
    keep_all_schedule,
    schedule_from_sequence,
    simulate,
)
from tests.support.interpreter import Machine
from tests.support.overwriting import overwriting
from tests.support.random_graphs import random_graph
from tests.support.sequences import random_sequence

_SEEDS = range(150)


def _cases(seed: int) -> list[tuple[Graph, Costs, Schedule]]:
    graph, costs = random_graph(seed, 4 + seed % 25)
    if seed % 2:
        graph, costs = overwriting(graph, costs, seed)
    costs = dataclasses.replace(costs, rng_state_bytes=seed % 3 * 7)
    sequences = [random_sequence(graph, seed, drop) for drop in (0.1, 0.5)]
    schedules = [keep_all_schedule(graph), *(schedule_from_sequence(graph, s) for s in sequences)]
    return [(graph, costs, schedule) for schedule in schedules]


@pytest.mark.parametrize("seed", _SEEDS)
def test_simulator_and_checker_agree_with_the_interpreter(seed: int) -> None:
    results = set()
    for graph, costs, schedule in _cases(seed):
        check(graph, schedule)
        simulation = simulate(graph, costs, schedule)
        machine = Machine(graph, costs).run(schedule)
        assert simulation.timeline.tolist() == machine.timeline
        assert simulation.peak_bytes == max([graph.fixed_bytes, *machine.timeline])
        assert machine.effects == [op.id for op in graph.ops if op.effect]
        outputs = tuple(machine.values[value] for value in graph.outputs)
        results.add((outputs, tuple(machine.handed_over.items()), machine.generator))
    assert len(results) == 1


@pytest.mark.parametrize("seed", _SEEDS)
def test_time_is_the_sum_of_the_computes(seed: int) -> None:
    for graph, costs, schedule in _cases(seed):
        expected = sum(int(costs.time_ns[step.op]) for step in schedule.steps if isinstance(step, Compute))
        assert simulate(graph, costs, schedule).time_ns == expected


def test_recomputation_happens_in_these_cases() -> None:
    counts = [
        sum(isinstance(s, RestoreRng) for s in schedule.steps) for seed in _SEEDS for *_, schedule in _cases(seed)
    ]
    assert sum(counts) > 50


def test_overwriting_happens_in_these_cases() -> None:
    steps = [step for seed in _SEEDS for *_, schedule in _cases(seed) for step in schedule.steps]
    assert sum(isinstance(step, Compute) and step.into is not None for step in steps) > 100


def test_what_was_written_over_comes_back_and_goes() -> None:
    """Its first ``Free`` gives nothing back, as its bytes went to the one that wrote over it; its second one does."""
    inputs = ((), (0,), (0, 1))
    graph = Graph(
        name="written over",
        ops=tuple(
            Op(i, f"op{i}", "op", read, (i,), Phase.FORWARD, overwrites=(0,) if i == 1 else ())
            for i, read in enumerate(inputs)
        ),
        values=tuple(Value(i, f"v{i}", i, i) for i in range(3)),
        storages=tuple(Storage(i, i, (i,)) for i in range(3)),
        inputs=(),
        forward_outputs=(),
        outputs=(2,),
        forward_ops=3,
    )
    costs = Costs(np.array([1, 1, 1]), np.array([0, 9, 0]), np.array([4, 4, 4]))
    steps = (Compute(0), Compute(1, into=0), Free(0), Compute(0), Compute(2), Free(0), Free(1))
    schedule = Schedule(steps, len(steps))
    check(graph, schedule)
    simulation = simulate(graph, costs, schedule)
    assert simulation.timeline.tolist() == Machine(graph, costs).run(schedule).timeline == [4, 13, 4, 8, 12, 12, 8]
    assert simulation.final_bytes == 4
    assert (simulation.peak_step, simulation.live_at_peak) == (1, (1,))


@pytest.mark.parametrize("seed", range(60))
def test_broken_schedules_are_rejected(seed: int) -> None:
    rng = random.Random(seed)
    for graph, _, schedule in _cases(seed):
        for broken in _mutations(graph, schedule, rng):
            with pytest.raises(ScheduleError, match="step"):
                check(graph, broken)


def _mutations(graph: Graph, schedule: Schedule, rng: random.Random) -> list[Schedule]:
    """Schedules that are certainly invalid."""
    steps = list(schedule.steps)
    frees = [i for i, step in enumerate(steps) if isinstance(step, Free)]
    restores = [i for i, step in enumerate(steps) if isinstance(step, RestoreRng)]
    saves = [i for i, step in enumerate(steps) if isinstance(step, SaveRng)]
    broken = []
    if frees:
        index = rng.choice(frees)
        broken.append(_with(schedule, [*steps[: index + 1], steps[index], *steps[index + 1 :]], index))
        storage = steps[index]
        assert isinstance(storage, Free)
        base = graph.storages[storage.storage].base
        first = next(i for i, step in enumerate(steps) if isinstance(step, Compute) and step.op == base)
        broken.append(_with(schedule, [*steps[:first], storage, *steps[first:]], first))
    for index in restores[:1] + saves[:1]:
        broken.append(_with(schedule, steps[:index] + steps[index + 1 :], index, -1))
    effects = [i for i, step in enumerate(steps) if isinstance(step, Compute) and graph.ops[step.op].effect]
    for index in effects[:1]:
        broken.append(_with(schedule, steps[:index] + steps[index + 1 :], index, -1))
        broken.append(_with(schedule, [*steps[: index + 1], steps[index], *steps[index + 1 :]], index))
    external = next((s.id for s in graph.storages if s.external), None)
    if external is not None:
        broken.append(Schedule((*steps, Free(external)), schedule.boundary))
    broken.append(Schedule((*steps, Compute(len(graph.ops))), schedule.boundary))
    broken.append(Schedule(tuple(steps), len(steps) + 1))
    return broken


def _with(schedule: Schedule, steps: list[object], index: int, change: int = 1) -> Schedule:
    boundary = schedule.boundary + (change if index < schedule.boundary else 0)
    return Schedule(tuple(steps), boundary)  # type: ignore[arg-type]
