"""Memory used again: pointwise operators over what dies, to the bit, and in the simulator to the byte."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture import capture
from lowtide.errors import ScheduleError
from lowtide.ir import Compute, Free, Schedule, check, format_schedule, simulate
from lowtide.ir.serial import schedule_from_json, schedule_to_json
from lowtide.program import overwrites
from tests.support.interpreter import Machine
from tests.support.overwriting import without_overwriting
from tests.support.text_forms import parse_schedule
from tests.support.training import compare_training


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path_factory.mktemp("costs")))
        yield


class Pointwise(nn.Module):
    """Every kind of pointwise operator, forward and backward, on dying tensors, views of them and tensors used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.rand(64))
        self.register_buffer("offset", torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale + 1
        x = x + x.flip(0)  # reads itself elsewhere
        x = torch.where(x > 0, x, x * 0.1) - self.offset
        x = (x / 3).exp().add(1).rsqrt().neg()
        x = nn.functional.dropout(nn.functional.gelu(x) + nn.functional.silu(x), 0.2)
        y = x.view(-1, 8, 8)
        x = (y + y.transpose(1, 2)).flatten(1)  # two views of one storage
        x = x.masked_fill(x > 1, 0.5).pow(3) + torch.tanh(x).sigmoid()
        half = x.half().float() + x  # another type in between
        return self.second(torch.relu(half)).square().mean()


def _sample(iteration: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(128, 64, generator=torch.Generator().manual_seed(iteration)),), {}


@functools.cache
def _program() -> tuple[Any, Any]:
    model = lowtide.rematerialize(Pointwise(), _sample(0)[0], budget="100%", planner="keep-all")
    (plan,) = lowtide.plans(model)
    return model, plan


def test_results_are_equal_and_the_peak_is_the_predicted() -> None:
    compare_training(Pointwise, _sample, budgets=("100%", "70%", "50%"))


def test_many_operators_write_into_what_dies() -> None:
    model, plan = _program()
    written = [
        plan.graph.ops[s.op].target for s in plan.schedule.steps if isinstance(s, Compute) and s.into is not None
    ]
    assert len(written) >= 15
    assert len(set(written)) >= 8
    (entry,) = (entry for entries in model.forward.entries.values() for entry in entries)
    assert "out=v" in entry.lowered.source


def test_simulator_checker_and_interpreter_agree() -> None:
    _, plan = _program()
    plain = without_overwriting(plan.schedule)
    check(plan.graph, plan.schedule)
    reused, before = (simulate(plan.graph, plan.costs, schedule) for schedule in (plan.schedule, plain))
    assert reused.final_bytes == before.final_bytes and reused.time_ns == before.time_ns
    assert (reused.timeline <= before.timeline).all() and (reused.timeline < before.timeline).any()
    machine = Machine(plan.graph, plan.costs).run(plan.schedule)
    assert machine.timeline == reused.timeline.tolist()


def test_schedules_with_reuse_are_written_and_read() -> None:
    _, plan = _program()
    assert parse_schedule(format_schedule(plan.schedule)) == plan.schedule
    assert schedule_from_json(schedule_to_json(plan.schedule)) == plan.schedule


def test_saved_plans_keep_it(tmp_path: Path) -> None:
    _, plan = _program()
    plan.save(tmp_path / "plan.json")
    loaded = lowtide.Plan.load(tmp_path / "plan.json")
    assert (loaded.schedule, loaded.peak_bytes) == (plan.schedule, plan.peak_bytes)


def _first(schedule: Schedule) -> tuple[int, Compute]:
    return next((i, s) for i, s in enumerate(schedule.steps) if isinstance(s, Compute) and s.into is not None)


def _unread(steps: list[Any], index: int, step: Compute) -> None:
    steps[index] = Compute(step.op, max(s.storage for s in steps if isinstance(s, Free)))


def _kept(steps: list[Any], index: int, step: Compute) -> None:
    steps.remove(Free(step.into if step.into is not None else -1))


@pytest.mark.parametrize(("spoil", "reason"), [(_unread, "must not"), (_kept, "not freed next")])
def test_the_checker_refuses(spoil: Callable[[list[Any], int, Compute], None], reason: str) -> None:
    _, plan = _program()
    index, step = _first(plan.schedule)
    steps = list(plan.schedule.steps)
    spoil(steps, index, step)
    with pytest.raises(ScheduleError, match=reason):
        check(plan.graph, Schedule(tuple(steps), plan.schedule.boundary))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7, 33), (128, 512), (3, 5, 17), (2, 8, 64, 64), (4, 1000), (5, 70000)])
def test_softmax_over_its_argument_gives_the_same_bits(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, gradient = (torch.randn(shape).to(device, dtype) for _ in range(2))
    for name in ("_softmax", "_log_softmax"):
        target, backward = (getattr(torch.ops.aten, f"{name}{end}").default for end in ("", "_backward_data"))
        for dim in range(len(shape)):
            result = target(x, dim, False)
            for operator, args in ((target, (x, dim, False)), (backward, (gradient, result, dim, dtype))):
                (form,) = overwrites._forms(operator)
                first = args[0].clone()
                form.target(first, *args[1:], **{form.keyword: first})
                assert torch.equal(first, operator(*args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 33), (256, 64, 512), (300, 1000, 3)])
def test_a_product_added_to_its_argument_gives_the_same_bits(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, inner, columns = shape
    draw = torch.Generator().manual_seed(0)
    total = torch.randn(rows, columns, generator=draw).to(device, dtype)
    right = torch.randn(inner, columns, generator=draw).to(device, dtype)
    addmm = torch.ops.aten.addmm.default
    for left in (torch.randn(rows, inner, generator=draw), torch.randn(inner, rows, generator=draw).t()):
        left = left.to(device, dtype)
        for form in overwrites._forms(addmm):
            first = total.clone()
            form.target(first, left, right, **({form.keyword: first} if form.keyword else {}))
            assert torch.equal(first, addmm(total, left, right))


@pytest.mark.parametrize("factor", ["left", "right"])
def test_a_matrix_that_is_a_factor_too_is_no_place_for_the_sum(factor: str) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(32, 32) * 0.2 for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x * 0.9
                pair = (x, weight) if factor == "left" else (weight, x)
                x = torch.addmm(x, *pair, beta=0.5, alpha=0.5).relu()
            return x.square().mean()

    sample = (torch.randn(32, 32),)
    torch.manual_seed(0)
    eager, planned = Mixing(), Mixing()
    planned.load_state_dict(eager.state_dict())
    graph = capture(planned, sample).program.graph
    assert not any(op.overwrites for op in graph.ops if op.target == "aten.addmm.default")
    lowtide.rematerialize(planned, sample, budget="70%", planning="wait")
    losses = [model(*sample) for model in (eager, planned)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(eager.weights, planned.weights, strict=True))


def test_softmax_is_written_over_its_first_argument_only() -> None:
    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.softmax(x @ x, -1) @ x).log_softmax(-1)

    program = capture(Attending(), (torch.randn(16, 16, requires_grad=True),)).program
    found = {op.target: op.overwrites == op.inputs[:1] for op in program.graph.ops if "softmax" in op.target}
    assert found == {
        "aten._softmax.default": True,
        "aten._log_softmax.default": True,
        "aten._log_softmax_backward_data.default": False,  # of the gradient that the caller hands in
        "aten._softmax_backward_data.default": True,
    }


_BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "atan2", "pow")
_UNARY = ("abs", "cos", "erf", "exp", "gelu", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt",
          "square", "tanh")  # fmt: skip
_GRADIENTS = ("gelu_backward", "sigmoid_backward", "silu_backward", "tanh_backward")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 33), (128, 64), (3, 5, 17), (1,)])
def test_writing_forms_give_the_same_bits(device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    aten = torch.ops.aten
    x, y = (torch.rand(shape).to(device, dtype) for _ in range(2))
    tried = 0
    for name in (*_BINARY, *_UNARY, *_GRADIENTS):
        packet = getattr(aten, name)
        overload = next(each for each in ("Tensor", "Tensor_Tensor", "default") if each in packet.overloads())
        target = getattr(packet, overload)
        args = (x,) if name in _UNARY else (x, y)
        expected = target(*args)
        for form in overwrites._forms(target):
            for position in range(len(args)) if form.keyword else (0,):
                given = [argument.clone() for argument in args]
                form.target(*given, **({form.keyword: given[position]} if form.keyword else {}))
                assert torch.equal(given[position], expected), (name, form)
                tried += 1
    assert tried >= len((*_BINARY, *_UNARY, *_GRADIENTS))


class Residual(nn.Module):
    """Gradients that are sums: a weight used by every block, and residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(128, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(self.shared(x)))
        return x.square().mean()


def _peaks(model: nn.Module, sample: torch.Tensor) -> list[int]:
    """Absent gradients, present ones, and gradients released by a hook as soon as they arrive."""

    def step() -> None:
        model(sample).backward()

    step()
    model.zero_grad(set_to_none=True)
    found = [lowtide.measure(step).peak_bytes for _ in range(2)]
    model.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    return [*found, lowtide.measure(step).peak_bytes]


def test_gradients_leave_as_early_as_in_eager() -> None:
    sample = torch.randn(64, 128)
    eager = _peaks(Residual(), sample)
    model = lowtide.rematerialize(Residual(), (sample,), budget="100%", planner="keep-all")
    ours = _peaks(model, sample)
    assert eager[1] < eager[0]
    assert all(found <= 1.01 * theirs for found, theirs in zip(ours, eager, strict=True)), (ours, eager)


@pytest.mark.parametrize("budget", ["100%", "60%"])
def test_an_optimizer_in_the_backward_pass(budget: str) -> None:
    """Parameters are updated while the pass still runs: the same result as eager's, and gradients never pile up."""

    def trained(planned: bool) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        model = Residual()
        sample = torch.randn(512, 128)
        if planned:
            lowtide.rematerialize(model, (sample,), budget=budget, planner="greedy")
            assert budget == "100%" or lowtide.plans(model)[0].overhead > 0
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        peaks = [lowtide.measure(lambda: model(sample).backward()).peak_bytes for _ in range(3)]
        return model, peaks[-1]

    (plain, plain_peak), (model, peak) = trained(False), trained(True)
    assert peak <= 1.01 * plain_peak
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.grad is None


class WeightFirst(torch.autograd.Function):
    """A product whose backward computes the weight's gradient before it reads the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        weight_gradient = x.t() @ gradient
        return gradient @ weight.t(), weight_gradient


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(32, 32) / 6 for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(WeightFirst.apply(x, weight))
        return x.square().mean()


def test_no_gradient_leaves_before_its_parameter_is_read_for_the_last_time() -> None:
    def trained(planned: bool) -> nn.Module:
        torch.manual_seed(0)
        model, sample = Products(), torch.randn(64, 32)
        if planned:
            lowtide.rematerialize(model, (sample,), budget="100%", planner="keep-all")

        def update(parameter: torch.Tensor) -> None:
            parameter.data.zero_()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        model(sample).backward()
        return model

    plain, model = trained(False), trained(True)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
