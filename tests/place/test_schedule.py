"""The addresses of schedules: a walk over the steps that holds bytes, not counts, finds no byte with two owners."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from lowtide.ir import (
    Compute,
    Costs,
    Fetch,
    Free,
    Graph,
    Kind,
    Schedule,
    SecondMemory,
    check,
    is_view,
    keep_all_schedule,
    load_instance,
    schedule_from_sequence,
    simulate,
)
from lowtide.place import CPU_ALIGNMENT, Layout, lay_out
from lowtide.solve import Problem, Status, solve
from tests.solve.small_graphs import chain, small_graph
from tests.support.wide import seeds


def _schedule(graph: Graph, seed: int) -> Schedule:
    """The program with some forward ops run again, so that tensors have several lives."""
    draw = random.Random(seed)
    again = [op.id for op in graph.ops[: graph.forward_ops] if op.recomputable and draw.random() < 0.5]
    return schedule_from_sequence(graph, [*range(graph.forward_ops), *again, *range(graph.forward_ops, len(graph.ops))])


def _walk(graph: Graph, costs: Costs, layout: Layout) -> None:
    """Follow the schedule's tensors by ``of_steps`` alone: none may be written where another one is."""
    owned, sizes = graph.owned, costs.storage_bytes.tolist()
    offsets = iter(layout.of_steps())
    at: dict[int, int] = {}
    for step in layout.schedule.steps:
        if isinstance(step, Free):
            at.pop(step.storage, None)
        if not isinstance(step, (Compute, Fetch)):
            continue
        here = next(offsets)
        listed = here if isinstance(here, list) else [] if here is None else [here]
        made = owned[step.op] if isinstance(step, Compute) else [step.storage]
        if isinstance(step, Compute) and step.into is not None:
            assert at.pop(step.into) == here
        written = dict(zip(made, listed, strict=True))
        taken = [(at[other], at[other] + sizes[other]) for other in at]
        for storage, offset in written.items():
            ranges = [*taken, *((o, o + sizes[s]) for s, o in written.items() if s != storage)]
            assert 0 <= offset <= layout.reserved_bytes - graph.fixed_bytes - sizes[storage]
            assert all(offset + sizes[storage] <= start or end <= offset for start, end in ranges if end > start)
        at = written | at  # what is live already stays where it is
    assert next(offsets, "end") == "end"


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_no_byte_has_two_owners(seed: int) -> None:
    graph, costs = small_graph(seed, ops=8)
    schedule = _schedule(graph, seed)
    layout = lay_out(graph, costs, schedule)
    _walk(graph, costs, layout)
    result = simulate(graph, costs, schedule)
    assert layout.allocations == result.allocations
    assert layout.reserved_bytes >= result.peak_bytes
    assert layout.placement.lower_bound_bytes >= result.peak_bytes - graph.fixed_bytes
    for each, offset in zip(layout.allocations, layout.offsets, strict=True):
        assert (offset is None) == (each.kind is Kind.FIXED)
    computes = [graph.ops[step.op] for step in schedule.steps if isinstance(step, Compute)]
    for op, offset in zip(computes, layout.of_steps(), strict=True):
        assert not is_view(graph, op) or offset is None


def test_tensors_that_are_written_over_others() -> None:
    """The same where all tensors have one size and every op may write over what it reads."""
    written = 0
    for seed in range(40):
        graph, costs = small_graph(seed, ops=8)
        costs = dataclasses.replace(costs, storage_bytes=np.where(costs.storage_bytes > 0, 4, 0))
        owned = graph.owned
        inner = {v.id for v in graph.values if not graph.storages[v.storage].external}
        ops = (
            dataclasses.replace(op, overwrites=tuple(v for v in op.inputs if v in inner and len(owned[op.id]) == 1))
            for op in graph.ops
        )
        graph = dataclasses.replace(graph, ops=tuple(ops))
        schedule = _schedule(graph, seed)
        check(graph, schedule)
        _walk(graph, costs, lay_out(graph, costs, schedule))
        written += sum(isinstance(step, Compute) and step.into is not None for step in schedule.steps)
    assert written > 20


def test_what_is_written_over_another_tensor_lies_where_that_lay() -> None:
    graph, costs = chain(3)
    layout = lay_out(graph, costs, schedule_from_sequence(graph, range(6)))
    steps = (Compute(0), Compute(1, into=0), Compute(2, into=1), Free(2))
    over = lay_out(graph, costs, Schedule(steps, 4))
    assert over.of_steps() == [0, 0, 0]
    assert over.reserved_bytes == 4 < layout.reserved_bytes


def test_what_comes_back_has_a_place_of_its_own() -> None:
    graph, costs = chain(12, times=(10,) * 24)
    costs = dataclasses.replace(costs, second_memory=SecondMemory(400_000_000, 400_000_000))
    budget = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes // 2
    schedule = solve(Problem(graph, costs, budget), "offload{effort=0}").schedule
    assert schedule is not None
    assert schedule.moves
    _walk(graph, costs, lay_out(graph, costs, schedule))


def test_a_plan_of_a_transformer() -> None:
    """With views, several results and workspaces, within 1 % of its peak."""
    graph, costs = load_instance(Path(__file__).parents[2] / "benchmarks" / "graphs" / "gpt2_2.json")
    schedule = solve(Problem(graph, costs, 125_000_000), "greedy").schedule
    assert schedule is not None
    layout = lay_out(graph, costs, schedule)
    _walk(graph, costs, layout)
    assert any(isinstance(offset, list) for offset in layout.of_steps())
    assert layout.reserved_bytes <= 1.01 * simulate(graph, costs, schedule).peak_bytes


def test_alignment_follows_the_device() -> None:
    graph, costs = chain(3, size=5)
    schedule = schedule_from_sequence(graph, range(6))
    bare = lay_out(graph, costs, schedule)
    assert bare.reserved_bytes == simulate(graph, costs, schedule).peak_bytes
    for layout, alignment in (
        (lay_out(graph, Costs(costs.time_ns, costs.workspace_bytes, costs.storage_bytes, 0, "cpu"), schedule), 64),
        (lay_out(graph, costs, schedule, alignment=16), 16),
    ):
        assert all(offset is not None and offset % alignment == 0 for offset in layout.offsets)
        assert layout.reserved_bytes == bare.reserved_bytes // 5 * alignment
    assert CPU_ALIGNMENT == 64


def test_within_a_capacity() -> None:
    graph, costs = small_graph(4)
    schedule = schedule_from_sequence(graph, range(len(graph.ops)))
    needed = lay_out(graph, costs, schedule).reserved_bytes
    assert lay_out(graph, costs, schedule, capacity=needed).reserved_bytes <= needed
    refused = lay_out(graph, costs, schedule, capacity=needed - 1)
    assert refused.placement.status is Status.INFEASIBLE
    assert set(refused.offsets) == {None}
