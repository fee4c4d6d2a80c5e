"""Collectives that run beside computing: begun where the schedule says, and waited for where the clock does."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.api import _planned
from lowtide.ir import Compute, Schedule, awaited, is_view, simulate
from lowtide.ir.graph import TANGENT_TARGET
from lowtide.lower.under_way import UnderWay
from lowtide.program import Program
from lowtide.runtime.programs.entry import lowered
from lowtide.solve.moving.early import improved
from lowtide.solve.moving.steps import place_transfers
from tests.support.networks import WithLoss
from tests.support.training import QUICK


class Collective:
    """An operator as a collective: until it is waited for it holds what it reads, which nobody may write into."""

    def __init__(self, target: Callable[..., Any], log: list[str]) -> None:
        self.target, self.log = target, log
        self.__name__ = "collective"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("not beside computing")

    def begin(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        self.log.append("begin")
        result = self.target(*args, **kwargs)
        versions = [arg._version for arg in args if isinstance(arg, torch.Tensor)]

        def end() -> Any:
            self.log.append("end")
            assert versions == [arg._version for arg in args if isinstance(arg, torch.Tensor)]
            return result

        return end


def with_collectives(program: Program, schedule: Schedule, seed: int, log: list[str]) -> Program:
    """Some operators of a program made collectives, but none that the schedule has write over another storage."""
    over = {step.op for step in schedule.steps if isinstance(step, Compute) and step.into is not None}
    draw, graph, calls = random.Random(seed), program.graph, list(program.calls)
    ops = list(graph.ops)
    for op in graph.ops:
        plain = not (op.effect or op.random or op.target == TANGENT_TARGET or is_view(graph, op) or op.id in over)
        if plain and draw.random() < 0.3:
            ops[op.id] = replace(op, collective=True, overwrites=())
            calls[op.id] = replace(calls[op.id], target=Collective(calls[op.id].target, log))
    return replace(program, graph=replace(graph, ops=tuple(ops)), calls=tuple(calls))


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_bits_and_peaks(budget: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32)) for _ in range(3)]
    model = WithLoss(nn.Sequential(*layers))
    eager = copy.deepcopy(model)
    args = (torch.randn(128, 32),)
    lowtide.rematerialize(model, args, budget=budget, planner=QUICK)
    ((entry,),) = _planned(model).entries.values()
    plan, program = entry.plan, entry.program

    def step(one: nn.Module) -> list[torch.Tensor]:
        one.zero_grad(set_to_none=True)
        loss = one(*args)
        loss.backward()
        return [loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)]

    log: list[str] = []
    beside = 0
    for seed in range(8):
        changed = with_collectives(program, plan.schedule, seed, log)
        costs = replace(plan.costs, collectives_beside=True)
        room = simulate(changed.graph, costs, plan.schedule).peak_bytes + (seed % 3 << 14)
        schedule = place_transfers(changed.graph, costs, plan.schedule, room)
        schedule = improved(changed.graph, costs, schedule, room)
        entry.lowered = lowered(changed, replace(plan, graph=changed.graph, costs=costs, schedule=schedule), None)
        assert all(map(torch.equal, step(model), step(eager)))
        log.clear()
        peak = lowtide.measure(lambda: step(model)).peak_bytes
        assert peak <= simulate(changed.graph, costs, schedule).peak_bytes
        assert log.count("begin") == log.count("end") == len(awaited(changed.graph, schedule))
        lines = entry.lowered.source.splitlines()
        begun = {line.split()[0]: number for number, line in enumerate(lines) if line.strip().startswith("c")}
        beside += sum(f"{name}()" not in lines[number + 1] for name, number in begun.items())
    assert beside > 20


def test_who_waits() -> None:
    ended: list[str] = []
    under_way = UnderWay()
    for name, made, read in (("gather", [1], []), ("reduction", [3], [2]), ("copy", [], [4]), ("last", [9], [8])):
        under_way.begin(lambda name=name: ended.append(name), made=made, read=read)  # type: ignore[misc]
    under_way.settle([2, 4, 7], [5])
    assert ended == []
    under_way.settle([3], [])
    assert ended == ["reduction"]
    under_way.settle([], [1, 4])
    assert ended == ["reduction", "gather", "copy"]
    under_way.settle_all()
    assert ended[3:] == ["last"]
