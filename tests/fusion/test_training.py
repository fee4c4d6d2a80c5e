"""Training with compiled kernels: close to eager, peaks as predicted and within the budget."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import pipeline
from lowtide.fusion import Kernel
from lowtide.pipeline import captured_program, fused
from lowtide.program import Program
from lowtide.settings import Settings
from tests.support.fixtures import without_clock
from tests.support.networks import WithLoss, residual_blocks, rows
from tests.support.training import MINIMUM, compare_training, prepared
from tests.support.wide import is_wide

TOLERANCE = 2e-5


def _dropout_network() -> nn.Module:
    def body() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32))

    return WithLoss(residual_blocks(body, depth=3))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)) + x)
        return x


class _Attended(nn.Module):
    """Normalised images looked at as rows of pixels: what is normalised apart is viewed, not only read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        bare = nn.GroupNorm(2, 8, affine=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, 8), nn.BatchNorm1d(8), nn.BatchNorm2d(8), bare])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            images = x.flatten(2) if isinstance(norm, nn.BatchNorm1d) else x
            rows = norm(images).view(*x.shape[:2], -1).transpose(1, 2)
            x = x + layer(rows).transpose(1, 2).reshape(x.shape)
        return x


class _SpelledOut(nn.Module):
    """An activation of five operators, as model code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x * torch.sigmoid(1.702 * x) * torch.exp(-(x**2))
        return x


def _wide_images(iteration: int) -> Any:
    return (torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(iteration)),), {}


def _images(iteration: int) -> Any:
    return (torch.randn(4, 4, 12, 12, generator=torch.Generator().manual_seed(iteration)),), {}


def test_dropout_draws_eagers_masks() -> None:
    compare_training(_dropout_network, rows(), budgets=("100%", "60%"), tolerance=TOLERANCE, compiler="inductor")


def test_batch_norm_counts_once() -> None:
    compare_training(
        lambda: WithLoss(_Convolutions()), _images, budgets=(MINIMUM,), tolerance=TOLERANCE, compiler="inductor"
    )


def test_views_of_what_is_normalised() -> None:
    compare_training(
        lambda: WithLoss(_Attended()),
        _wide_images,
        budgets=("100%", "60%"),
        iterations=2,
        tolerance=TOLERANCE,
        compiler="inductor",
    )


def test_views_are_of_what_they_read() -> None:
    args, kwargs = _wide_images(0)
    settings = Settings(budget="100%", compiler="inductor")
    program = fused(captured_program(WithLoss(_Attended()), args, kwargs, settings).program, settings)
    values = program.graph.values
    views = [op for op in program.graph.ops if op.target in ("aten.view.default", "aten.transpose.int")]
    assert len(views) > 8
    for op in views:
        assert {values[value].storage for value in op.outputs} == {values[value].storage for value in op.inputs}


def test_budgets_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same kernels run at every budget that they meet, so recomputing changes nothing."""
    monkeypatch.setattr(pipeline, "_COSTLY", float("inf"))

    def gradients(budget: str) -> list[torch.Tensor]:
        model = prepared(_dropout_network, rows(), budget, planner="greedy", compiler="inductor")
        torch.manual_seed(3)
        model(*rows()(0)[0]).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for one, other in zip(gradients("100%"), gradients("60%"), strict=True):
        assert torch.equal(one, other)


class _Attending(nn.Module):
    """Attention spelled out: the kernels around its softmax read and write several large tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for projection in self.projections:
            h = projection(x)
            scores = (h @ h.transpose(-1, -2)) / 8 + self.bias
            x = x + torch.softmax(scores, -1) @ h
        return x


def _sequences(iteration: int) -> Any:
    return (torch.randn(8, 64, 32, generator=torch.Generator().manual_seed(iteration)),), {}


def test_the_smallest_budget_is_that_of_operators_or_kernels() -> None:
    """What the error names is met; also where bytes are set aside."""
    model, (args, kwargs) = WithLoss(_Attending()), _sequences(0)
    every = ({"budget": 1000}, {"total_budget": 300_000}, {"budget": 5000, "reserve": 4000})
    for options in every if is_wide() else every[-1:]:
        with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
            _chosen(model, args, kwargs, Settings(planner="greedy", compiler="inductor", **options))
        name = next(iter(options))
        met = {**options, name: refused.value.minimum_bytes}
        _, plan = _chosen(model, args, kwargs, Settings(planner="greedy", compiler="inductor", **met))
        assert plan.peak_bytes <= plan.budget_bytes == refused.value.minimum_bytes - refused.value.aside_bytes
        apart = [_minimum(model, options, compiler) for compiler in ("eager", "inductor")]
        assert refused.value.minimum_bytes == min(apart)


def _chosen(model: nn.Module, args: Any, kwargs: Any, settings: Settings) -> tuple[Program, lowtide.Plan]:
    return pipeline.planned_program(captured_program(model, args, kwargs, settings), model, args, kwargs, settings)


def _minimum(model: nn.Module, options: dict[str, int], compiler: str) -> int:
    with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
        _planned(model, Settings(planner="greedy", compiler=compiler, **options))
    return refused.value.minimum_bytes


@pytest.mark.parametrize(
    "budget", ["60%", *(pytest.param(each, marks=pytest.mark.slow) for each in ("45%", "40%")), "36%"]
)
def test_the_quicker_of_kernels_and_operators(budget: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same bytes; where kernels cannot meet the budget, operators do. The model trains by what was chosen."""
    monkeypatch.setattr(pipeline, "_COSTLY", 0.0)
    model, (args, kwargs) = WithLoss(_Attending()), _sequences(0)
    unconstrained = _planned(model, Settings("100%", planner="keep-all", compiler="inductor")).unconstrained_peak_bytes
    limit = unconstrained * int(budget.rstrip("%")) // 100
    plans = {}
    for compiler in ("inductor", "eager"):
        with contextlib.suppress(lowtide.InfeasibleBudgetError):
            plans[compiler] = _planned(model, Settings(limit, planner="greedy", compiler=compiler))
    settings = Settings(limit, planner="greedy", compiler="inductor")
    if not plans:
        with pytest.raises(lowtide.InfeasibleBudgetError) as refused:
            _chosen(model, args, kwargs, settings)
        assert refused.value.minimum_bytes > refused.value.budget_bytes == limit
        return
    program, plan = _chosen(model, args, kwargs, settings)
    assert plan.time_ns == min(other.time_ns for other in plans.values())
    compiled = any(isinstance(call.target, Kernel) for call in program.calls)
    assert compiled == (plan.time_ns == plans["inductor"].time_ns if "inductor" in plans else False)
    compare_training(
        lambda: WithLoss(_Attending()), _sequences, budgets=(limit,), tolerance=TOLERANCE if compiled else 0.0,
        planner="greedy", compiler="inductor",
    )  # fmt: skip


def test_no_search_for_operators_that_take_longer_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without recomputation already: the chain's twelve passes over memory are one in its kernel."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1 << 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.sigmoid(x) * self.weight
            return x.sum()

    planned = []
    made = pipeline.make_program_plan

    def make(program: Program, *args: Any, **kwargs: Any) -> lowtide.Plan:
        planned.append(program)
        return made(program, *args, **kwargs)

    monkeypatch.setattr(pipeline, "make_program_plan", make)
    without_clock(monkeypatch)
    monkeypatch.setattr(pipeline, "_COSTLY", -1.0)
    settings = Settings("100%", planner="keep-all", compiler="inductor")
    program, _ = _chosen(Chain(), (torch.randn(1 << 20),), {}, settings)
    assert planned == [program]
    assert any(isinstance(call.target, Kernel) for call in program.calls)


def _planned(model: nn.Module, settings: Settings) -> lowtide.Plan:
    program = fused(captured_program(model, *_sequences(0), settings).program, settings)
    return pipeline.make_program_plan(program, settings, model)


def test_fewer_bytes_than_eager() -> None:
    """What is only read by fused kernels is never written: the peak without recomputation is lower than eager's."""
    plans = []
    for compiler in ("eager", "inductor"):
        model = prepared(lambda: WithLoss(_SpelledOut()), rows(), "100%", planner="keep-all", compiler=compiler)
        plans += lowtide.plans(model)
    eager, compiled = plans
    assert compiled.unconstrained_peak_bytes < eager.unconstrained_peak_bytes


def test_unknown_compiler() -> None:
    with pytest.raises(lowtide.PlanError, match='use "eager" or "inductor"'):
        lowtide.rematerialize(nn.Linear(2, 2), budget="50%", compiler="gcc")
