"""Stages of one rank that share a budget: what must fit, what is chosen, and what they take."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost import analytical_costs
from lowtide.ir import Costs
from lowtide.program.program import Program
from lowtide.sharing import Assignment, Constraint, Footprint, Member, peak_bytes
from lowtide.sharing.stages import Pass, most_in_flight, stage_constraints
from lowtide.sharing.upgrades import quickest, upgraded
from tests.support.fixtures import without_clock
from tests.support.training import QUICK

# Of two stages: each stage's micro-batches run forward, and backward in the order in which they came.
ORDER: list[Pass] = [
    (0, False), (0, False), (1, False), (1, False), (0, False), (1, True), (1, False), (1, True), (0, True), (0, True),
    (1, True), (0, True),
]  # fmt: skip
ROWS, WIDTH = 64, 32


def test_what_is_in_flight() -> None:
    assert most_in_flight(ORDER) == {0: 3, 1: 2}
    assert most_in_flight([(0, False), (0, True)]) == {0: 1}


def test_constraints_are_what_a_walk_through_the_passes_finds() -> None:
    draw = random.Random(0)
    for _ in range(20):
        left = [draw.randrange(9), draw.randrange(9)]
        taken = [
            Footprint(saved := draw.randrange(50), saved + draw.randrange(50), draw.randrange(99)) for _ in range(2)
        ]
        held, gradients, most = [0, 0], [0, 0], 0
        for stage, backward in ORDER:
            held[stage] -= backward
            waiting = sum(count * one.saved_bytes for count, one in zip(held, taken, strict=True))
            own = taken[stage].backward_bytes if backward else taken[stage].forward_bytes
            most = max(most, waiting + own + sum(gradients))
            held[stage] += not backward
            gradients[stage] = left[stage] if backward else gradients[stage]
        assert held == [0, 0]
        assert peak_bytes(stage_constraints(ORDER, left), taken) == most


def _curve(draw: random.Random) -> list[Assignment]:
    """Ways to run a stage: the more it saves, the quicker it is."""
    points = sorted(draw.sample(range(1, 200), 2 * draw.randint(1, 5)))
    saved, slow = points[: len(points) // 2], points[len(points) // 2 :][::-1]
    ways = [
        (Footprint(one, one + draw.randrange(40), one + draw.randrange(60)), time)
        for one, time in zip(saved, slow, strict=True)
    ]
    draw.shuffle(ways)
    plans: list[Any] = [SimpleNamespace(time_ns=time) for _, time in ways]
    return [Assignment(footprint, plan=plan) for (footprint, _), plan in zip(ways, plans, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(1, 4)
    order = [(stage, backward) for _ in range(3) for backward in (False, True) for stage in range(stages)]
    order = order if draw.random() < 0.5 else sorted(order, key=lambda one: one[1])
    constraints: list[Constraint] = stage_constraints(order, [draw.randrange(20) for _ in range(stages)])
    menus, members = [_curve(draw) for _ in range(stages)], [Member(None, None)] * stages  # type: ignore[arg-type]

    def time(chosen: Any) -> int:
        return sum(one.plan.time_ns for one in chosen)

    def peak(chosen: Any) -> int:
        return peak_bytes(constraints, [one.footprint for one in chosen])

    every = list(itertools.product(*menus))
    budget = sorted(map(peak, every))[draw.randrange(len(every))]
    fit = [one for one in every if peak(one) <= budget]
    found = quickest(members, constraints, menus, budget)
    assert peak(found) <= budget
    assert time(found) == min(map(time, fit))
    assert time(upgraded(members, constraints, draw.choice(fit), menus, budget)) == time(found)


def stages() -> list[nn.Module]:
    """Two of different depth."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, WIDTH)) for _ in range(5)]
    return [nn.Sequential(*blocks[:3]), nn.Sequential(*blocks[3:])]


class Schedule:
    """One rank with two stages, whose ``step`` runs their passes as PyTorch's schedules do."""

    def __init__(self, modules: list[nn.Module], kinds: str = "FB", order: list[Pass] = ORDER) -> None:
        self._stages = [
            SimpleNamespace(submod=module, stage_index=number, is_first=number == 0, group_rank=0)
            for number, module in enumerate(modules)
        ]
        self.order = order
        actions = [SimpleNamespace(stage_index=stage, computation_type=kinds[backward]) for stage, backward in order]
        self.pipeline_order = {0: [None, *actions]}

    def step(self, batches: list[torch.Tensor]) -> None:
        torch.manual_seed(1)
        ran: dict[int, int] = defaultdict(int)
        outputs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for stage, backward in self.order:
            number = ran[2 * stage + backward]
            ran[2 * stage + backward] += 1
            if not backward:
                given = batches[number].clone().requires_grad_(stage > 0)
                outputs[stage, number] = given, self._stages[stage].submod(given)
            else:
                _, output = outputs.pop((stage, number))
                output.sum().backward()

    def peak(self, batches: list[torch.Tensor]) -> int:
        for stage in self._stages:
            stage.submod.zero_grad()
        return lowtide.measure(self.step, batches).peak_bytes


def batches(rows: int = ROWS) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return list(torch.randn(3, rows, WIDTH).unbind())


def drawn_costs(program: Program, seed: int) -> Costs:
    """Operators take any time."""
    costs = analytical_costs(program)
    return dataclasses.replace(costs, time_ns=100 * np.random.default_rng(seed).integers(1, 1000, len(costs.time_ns)))


SAMPLES = ((torch.ones(ROWS, WIDTH),),) * 2


@pytest.mark.parametrize("share, seed", [(0.6, None), (0.6, 3), pytest.param(0.8, None, marks=pytest.mark.slow)])
def test_they_stay_within_one_budget(share: float, seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, whichever gradients there are and also with smaller micro-batches, whatever takes long, and equal to the
    bit."""
    if seed is not None:
        without_clock(monkeypatch, lambda program: drawn_costs(program, seed))
    reference, ours = (Schedule(stages()) for _ in range(2))
    kept = 3 * 2 * ROWS * WIDTH * 4  # copies of the micro-batches, and gradients of the second stage's
    budget = int(share * reference.peak(batches()))
    lowtide.rematerialize_stages(ours, *SAMPLES, budget=budget, reserve=kept, planner=QUICK)
    plans = [lowtide.plans(one.submod)[0] for one in ours._stages]
    assert [plan.in_flight for plan in plans] == [3, 2]
    assert {plan.budget_bytes + plan.waiting_bytes for plan in plans} == {budget - kept}
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in plans)
    assert sum(plan.overhead for plan in plans) > 0
    assert "calls; beside one of them" in str(plans[0])
    for rows in (ROWS, ROWS, ROWS // 2):
        assert ours.peak(batches(rows)) <= budget
        reference.peak(batches(rows))
        for mine, theirs in zip(ours._stages, reference._stages, strict=True):
            for one, other in zip(mine.submod.parameters(), theirs.submod.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)


def test_a_percentage_is_of_all_passes() -> None:
    schedule = Schedule(stages())
    lowtide.rematerialize_stages(schedule, *SAMPLES, budget="100%", planner=QUICK)
    assert [lowtide.plans(one.submod)[0].overhead for one in schedule._stages] == [0, 0]


def test_a_budget_that_is_too_small_leaves_them_as_they_are() -> None:
    """What the error says would do does."""
    schedule = Schedule(stages())
    with pytest.raises(lowtide.InfeasibleBudgetError) as found:
        lowtide.rematerialize_stages(schedule, *SAMPLES, budget=20_000, planner=QUICK)
    assert all("forward" not in vars(one.submod) for one in schedule._stages)
    lowtide.rematerialize_stages(schedule, *SAMPLES, budget=found.value.minimum_bytes, planner=QUICK)
    for one in schedule._stages:
        lowtide.restore(one.submod)
        assert "forward" not in vars(one.submod)


@pytest.mark.parametrize(
    ("schedule", "samples", "words"),
    [
        (object(), SAMPLES, "not one of torch.distributed.pipelining"),
        (Schedule(stages()), SAMPLES[:1], "1 samples for 2 stages"),
        (Schedule(stages(), "FI"), SAMPLES, "splits backward passes"),
        (Schedule(stages(), order=[]), SAMPLES, "does not tell in which order"),
    ],
)
def test_what_makes_no_sense(schedule: Any, samples: Any, words: str) -> None:
    with pytest.raises(lowtide.PlanError, match=words):
        lowtide.rematerialize_stages(schedule, *samples, budget="60%")
