"""What the checker accepts runs to the program's results; what breaks a rule is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lowtide.errors import ScheduleError
from lowtide.ir import (
    Compute,
    Free,
    Graph,
    Op,
    Phase,
    RestoreRng,
    SaveRng,
    Schedule,
    Step,
    Storage,
    Value,
    check,
    keep_all_schedule,
    schedule_from_sequence,
)
from tests.support.interpreter import Machine
from tests.support.random_graphs import random_graph
from tests.support.sequences import random_sequence

_DRAWS = Graph(
    name="two draws",
    ops=tuple(Op(i, f"draw{i}", "rand", (), (i,), Phase.FORWARD, random=True) for i in range(2)),
    values=tuple(Value(i, f"v{i}", i, i) for i in range(2)),
    storages=tuple(Storage(i, i, (i,)) for i in range(2)),
    inputs=(),
    forward_outputs=(),
    outputs=(0, 1),
    forward_ops=2,
)


def test_replay_from_the_state_of_the_first_execution() -> None:
    steps = (Compute(0), SaveRng(1), Compute(1), Free(1), RestoreRng(1), Compute(1))
    check(_DRAWS, Schedule(steps, 4))


@pytest.mark.parametrize(
    ("steps", "boundary", "message"),
    [
        (
            (SaveRng(1), Compute(0), Compute(1), Free(1), RestoreRng(1), Compute(1)),
            3,
            "step 1: .*draw1 is not followed",
        ),
        (
            (Compute(0), SaveRng(1), Compute(1), Free(1), RestoreRng(1), Compute(1)),
            5,
            "step 5: .*draw1 is not followed",
        ),
        ((Compute(0), Compute(1), Free(1), RestoreRng(1), Compute(1)), 2, "step 3: .*draw1 was not saved"),
        ((Compute(0), Compute(1), Free(1), Compute(1)), 2, "step 3: random op draw1 is recomputed without"),
        ((SaveRng(0), Compute(0), Compute(1)), 3, "draw0 is saved and never restored"),
        ((Compute(0), SaveRng(0), Compute(1)), 3, "step 1: .*draw0 can only be saved once"),
        ((Compute(0), Compute(1), SaveRng(2)), 3, "step 2: there is no op 2"),
        ((Compute(0), Compute(1), RestoreRng(-1)), 3, "step 2: there is no op -1"),
        ((Compute(0), Compute(1), Free(2)), 3, "step 2: there is no storage 2"),
        ((Compute(1), Compute(0)), 2, "step 1: draw0 first runs after draw1"),
        ((Compute(0), Compute(1)), 1, "step 1: forward op draw1 first runs in the backward program"),
        ((Compute(0), Compute(1), Free(1)), 3, "output v1 is not live at the end"),
    ],
)
def test_broken_rules_are_named(steps: tuple[Step, ...], boundary: int, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check(_DRAWS, Schedule(steps, boundary))


def test_an_input_is_not_freed() -> None:
    graph, _ = random_graph(0, 12)
    given = next(storage for storage in graph.storages if storage.external)
    steps = keep_all_schedule(graph).steps
    with pytest.raises(ScheduleError, match="is not the program's to free"):
        check(graph, Schedule((Free(given.id), *steps), keep_all_schedule(graph).boundary + 1))


def test_what_was_handed_to_the_caller_is_not_freed() -> None:
    graph = replace(_DRAWS, forward_outputs=(0,))
    steps = (Compute(0), Compute(1))
    check(graph, Schedule(steps, 2))
    with pytest.raises(ScheduleError, match="step 2: the storage of v0 belongs to the caller and cannot be freed"):
        check(graph, Schedule((*steps, Free(0)), 2))


def test_mutations_that_pass_run_to_the_same_results() -> None:
    accepted = rejected = 0
    for seed in range(80):
        rng = random.Random(seed)
        graph, costs = random_graph(seed, 4 + seed % 20)
        expected = _results(Machine(graph, costs).run(keep_all_schedule(graph)))
        schedule = schedule_from_sequence(graph, random_sequence(graph, seed, 0.4))
        for _ in range(20):
            mutated = _mutated(schedule, rng)
            try:
                check(graph, mutated)
            except ScheduleError:
                rejected += 1
                continue
            accepted += 1
            assert _results(Machine(graph, costs).run(mutated)) == expected
    assert min(accepted, rejected) > 150


def _mutated(schedule: Schedule, rng: random.Random) -> Schedule:
    """One step dropped, repeated or moved, or the boundary moved."""
    steps, boundary = list(schedule.steps), schedule.boundary
    index = rng.randrange(len(steps))
    match rng.choice(("drop", "repeat", "move", "boundary")):
        case "drop":
            del steps[index]
            boundary -= index < boundary
        case "repeat":
            steps.insert(index, steps[index])
            boundary += index < boundary
        case "move":
            steps.insert(rng.randrange(len(steps)), steps.pop(index))
        case "boundary":
            boundary = index
    return Schedule(tuple(steps), boundary)


def _results(machine: Machine) -> tuple[object, ...]:
    outputs = [machine.values[value] for value in machine.graph.outputs]
    return outputs, machine.handed_over, machine.generator, machine.effects
