"""Schedules that no planner makes: whatever the checker allows to move runs, and is equal to the bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import lowtide
from lowtide.api import _planned
from lowtide.errors import ScheduleError
from lowtide.ir import Fetch, Free, Graph, Offload, Schedule, check, keep_all_schedule
from lowtide.runtime.programs.entry import lowered
from tests.support.networks import WithLoss


def _schedules(graph: Graph) -> Iterator[Schedule]:
    """Valid ones in which gradients, too, move at any time."""
    gradients = [graph.values[value].storage for value in graph.outputs]
    for seed in range(40):
        draw = random.Random(seed)
        schedule = keep_all_schedule(graph)
        for _ in range(8):
            storage = draw.choice(gradients) if draw.random() < 0.5 else draw.randrange(len(graph.storages))
            at, end = sorted(draw.randrange(len(schedule.steps) + 1) for _ in range(2))
            moved = [Offload(storage), Free(storage)], [Fetch(storage)]
            steps = (*schedule.steps[:at], *moved[0], *schedule.steps[at:end], *moved[1], *schedule.steps[end:])
            before = sum(len(part) for part, place in zip(moved, (at, end), strict=True) if place < schedule.boundary)
            tried = Schedule(steps, schedule.boundary + before)
            try:
                check(graph, tried)
            except ScheduleError:
                continue
            schedule = tried
        if any(isinstance(step, Offload) and step.storage in gradients for step in schedule.steps):
            yield schedule


def test_gradients_that_move(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithLoss(nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16)))
    eager = copy.deepcopy(model)
    args = (torch.randn(64, 16),)
    lowtide.rematerialize(model, args, budget="90%", planner="offload{effort=0}", offload=f"disk:{tmp_path}")
    ((entry,),) = _planned(model).entries.values()

    def step(one: nn.Module) -> list[torch.Tensor]:
        one.zero_grad(set_to_none=True)
        loss = one(*args)
        loss.backward()
        return [loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)]

    ran = 0
    for schedule in _schedules(entry.plan.graph):
        entry.lowered = lowered(entry.program, replace(entry.plan, schedule=schedule), None)
        assert all(map(torch.equal, step(model), step(eager)))
        ran += 1
    assert ran > 10
