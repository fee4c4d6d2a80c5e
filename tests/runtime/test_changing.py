"""Buffers and arguments that are written into between the forward and the backward pass, where eager saves what it needs."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from lowtide.cost import analytical_costs
from lowtide.ir import Costs
from lowtide.program.program import Program
from tests.support.fixtures import without_clock
from tests.support.networks import generator

WIDTH = 32


class _Block(nn.Module):
    """What eager does not save of its argument, or of its memory, a plan reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(WIDTH).expand(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (2 * x + self.memory).sigmoid()
        return self.down(functional.gelu(self.up(h)).sin())


class _Writing(nn.Module):
    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.decides, self.blocks = decides, nn.ModuleList(_Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.decides and x.sum() > 1e9:  # then its blocks are parts
            return x
        for block in self.blocks:
            y = block(x)
            if self.decides:
                x += y
            else:
                x = x + y
        return x.square().mean()

    def update(self) -> None:
        with torch.no_grad():
            for block in self.blocks:
                block.memory = block.memory.clone()  # type: ignore[assignment, operator]
                block.memory[:1].add_(block.down.bias)  # type: ignore[index, union-attr, arg-type]


@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize("replaced", [False, True])
def test_what_changes_before_the_backward_pass(decides: bool, replaced: bool) -> None:
    torch.manual_seed(0)
    plain = _Writing(decides)
    if not replaced:
        for block in plain.blocks:
            block.memory = torch.zeros(16, WIDTH)  # type: ignore[assignment]
    batches = [torch.randn(16, WIDTH, generator=generator(number)) for number in range(4)]
    model = lowtide.rematerialize(copy.deepcopy(plain), (batches[0],), budget="100%", planning="wait")
    for x in batches:
        for one in (plain, model):
            loss = one(x)
            if replaced:
                one.update()
            else:
                for block in one.blocks:
                    block.memory.add_(1)
            loss.backward()
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
        assert all(map(torch.equal, model.buffers(), plain.buffers()))


class _Masked(nn.Module):
    """Large constants that only the forward pass reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("mask", torch.ones(256, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x) + self.mask)
        return x.square().mean()

    def kind(self) -> torch.dtype:
        """Names the constant, and writes nothing."""
        return self.mask.dtype


def test_first_calls_stay_within_the_budget() -> None:
    """Copies of what never changes have no room beside the plan."""
    model, x = _Masked(), torch.randn(256, WIDTH)
    lowtide.rematerialize(model, (x,), budget="70%", planning="wait")
    (plan,) = lowtide.plans(model)
    for _ in range(3):
        assert lowtide.measure(lambda: model(x).backward()).peak_bytes <= plan.budget_bytes
        model.zero_grad()


class _Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x) if x.sum() < 1e9 else x
        return x.square().mean()


def test_second_calls_of_parts_stay_within_the_budget_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of arguments that have not changed in the first step have no room beside the plans of all parts."""
    without_clock(monkeypatch, _costs)
    torch.manual_seed(0)
    model, x = _Deciding(), torch.randn(256, WIDTH)
    for block in model.blocks:
        block.memory = torch.zeros(WIDTH)  # type: ignore[assignment]
    budget = lowtide.measure(lambda: model(x).backward()).peak_bytes * 29 // 100
    lowtide.rematerialize(model, (x,), budget=budget, planner="greedy")
    peaks = []
    for _ in range(4):
        model.zero_grad()
        peaks.append(lowtide.measure(lambda: model(x).backward()).peak_bytes)
    assert len(model.forward.parts.planned()) == 6  # type: ignore[union-attr, operator]
    assert max(peaks[1:]) <= budget, (peaks, budget)


def _costs(program: Program) -> Costs:
    """By no clock: what reads an argument or a buffer takes next to no time, so that a plan runs it again."""
    costs, parameters = analytical_costs(program), program.parameters
    given = {value for value in program.inputs[parameters:] if value is not None}
    quick = [not set(op.inputs).isdisjoint(given) for op in program.graph.ops]
    return dataclasses.replace(costs, time_ns=np.where(quick, 1, costs.time_ns))


@pytest.mark.parametrize("first, fails", [(1, 0), (3, 1)], ids=["from the second step on", "later"])
@pytest.mark.parametrize("argument", [False, True], ids=["buffer", "argument"])
def test_what_begins_to_change_is_copied(
    argument: bool, first: int, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that has not changed in the first steps is lost once at most."""
    without_clock(monkeypatch, _costs)
    torch.manual_seed(0)
    plain = nn.Sequential(*(_Block() for _ in range(4)))
    for block in plain:
        block.memory = torch.zeros(WIDTH)  # type: ignore[assignment]
    samples = [torch.randn(256, WIDTH, generator=generator(number)) for number in range(first + 3)]
    model = lowtide.rematerialize(copy.deepcopy(plain), (samples[0],), budget="55%", planner="greedy")
    failed = 0
    for number, sample in enumerate(samples):
        for one in (plain, model):
            x = sample.clone()
            one.zero_grad()
            loss = one(x).square().mean()
            if number >= first:
                (x if argument else one[0].memory).add_(1)  # type: ignore[union-attr, operator]
            try:
                loss.backward()
            except lowtide.ExecutionError as error:
                assert "Later calls read a copy of it" in str(error)
                failed += 1
                continue
            if one is model:
                assert all(map(torch.equal, *([each.grad for each in both.parameters()] for both in (plain, model))))
    assert failed == fails
