"""What else there is, on a CUDA device: real models, precisions, memory on the host, parts, shapes, compilers, budgets."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from benchmarks.models import MODELS
from benchmarks.zoo import Sample, in_precision, loss_of, moved
from lowtide.device import interface_of
from lowtide.memory.allocators import free_memory, round_up
from lowtide.runtime.updates.away import AwayTensor
from tests.device.models import Block, Deciding, Mean

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
WHOLE = {"on_capture_error": "error"}
QUICK = "auto{effort=0}"


def transformer() -> Sample:
    return Mean(*(Block(128) for _ in range(4)), nn.Linear(128, 8)), (torch.randn(16, 256, 128),), {}


def convolutions() -> Sample:
    stages = [
        layer
        for before, after in ((3, 32), (32, 32), (32, 32), (32, 32))
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU(), nn.Dropout(0.1))
    ]
    body = (*stages, nn.MaxPool2d(2), nn.ConvTranspose2d(32, 16, 2, 2), nn.Flatten(), nn.Linear(16 * 64 * 64, 10))
    return Mean(*body), (torch.randn(16, 3, 64, 64),), {}


def _of(name: str, dtype: torch.dtype = torch.float32) -> Callable[[], Sample]:
    return lambda: in_precision(MODELS[name](), dtype)


CASES: dict[str, Callable[[], Sample]] = {
    "transformer": transformer,
    "convolutions": convolutions,
    **{name: _of(name) for name in ("gpt2", "llama", "t5", "resnet", "vit", "unet2d")},
    **{f"{name}-bf16": _of(name, torch.bfloat16) for name in ("gpt2", "llama", "vit", "unet2d")},
}
OWN = ("transformer", "convolutions")


def case(name: str) -> Sample:
    torch.manual_seed(0)
    return moved(CASES[name](), DEVICE)


def of(sample: Sample, *, budget: str = "60%", **options: Any) -> Sample:
    """A copy of the sample, planned."""
    model, args, kwargs = sample
    model = lowtide.rematerialize(copy.deepcopy(model), args, kwargs, budget=budget, **options)
    return model, args, kwargs


def trained(
    sample: Sample, steps: int = 3, autocast: torch.dtype | None = None, scaled: bool = False
) -> list[torch.Tensor]:
    """Losses, then parameters and buffers."""
    model, args, kwargs = sample
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    torch.cuda.manual_seed_all(2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", autocast, enabled=autocast is not None):
            loss = loss_of(model(*args, **kwargs))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    model.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters()), *model.buffers()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def step_peak(sample: Sample) -> int:
    model, args, kwargs = sample

    def step() -> None:
        result = model(*args, **kwargs)  # held until the end
        loss_of(result).backward()

    model.zero_grad()
    found = lowtide.measure(step)
    model.zero_grad()
    return found.peak_bytes


@pytest.mark.parametrize("name", CASES)
def test_rematerialized(name: str) -> None:
    """Equal to the bit, dropout and running statistics included; the generator is left as it was; within the budget."""
    sample = case(name)
    expected = trained((copy.deepcopy(sample[0]), *sample[1:]))
    generator = interface_of(DEVICE).generator()
    after = generator.get_state()
    budgeted = of(sample, **WHOLE)
    assert torch.equal(generator.get_state(), after)
    assert equal(trained(budgeted), expected)
    assert torch.equal(generator.get_state(), after)
    (plan,) = lowtide.plans(budgeted[0])
    peak = step_peak(budgeted)
    assert plan.overhead > 0
    assert 0.95 * plan.peak_bytes <= peak <= plan.budget_bytes


@pytest.mark.parametrize("name", OWN)
def test_moved_to_the_host(name: str) -> None:
    """By streams of their own, and back."""
    sample = case(name)
    model, args, _ = of(sample, budget="50%", planner="offload{effort=0}", offload="cpu")
    (plan,) = lowtide.plans(model)
    assert plan.schedule.moves
    assert equal(trained((model, args, {})), trained((copy.deepcopy(sample[0]), args, {})))
    assert step_peak((model, args, {})) <= plan.budget_bytes
    found = []
    for one in (model, sample[0]):
        torch.cuda.manual_seed_all(3)
        first, second = one(*args), one(2 * args[0])
        first.backward()
        second.backward()
        found.append([first.detach(), second.detach()])
    assert len(found) == 2


def test_states_of_an_optimizer_on_the_host() -> None:
    """Between updates; the same results."""
    torch.manual_seed(0)
    model = Mean(*(nn.Linear(256, 256) for _ in range(8))).to(DEVICE)
    eager, x = copy.deepcopy(model), torch.ones(16, 256, device=DEVICE)
    ours, theirs = (torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, eager))
    model(x).backward()  # cuBLAS has its workspace from here on
    model.zero_grad()
    level = torch.cuda.memory_allocated()
    options: dict[str, Any] = {"total_budget": level + 10 * 256 * 256 * 4, "planner": QUICK, "offload": "cpu"}
    lowtide.rematerialize(model, (x,), **options, optimizer=ours)
    for _ in range(3):
        losses = []
        for one, optimizer in ((model, ours), (eager, theirs)):
            losses.append(one(x))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert equal([losses[0].detach()], [losses[1].detach()])
    assert equal([*model.parameters()], [*eager.parameters()])
    assert any(isinstance(v, AwayTensor) for state in ours.state.values() for v in state.values())
    saved, expected = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert equal([saved[i]["exp_avg"] for i in saved], [expected[i]["exp_avg"] for i in expected])


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", OWN)
def test_autocast(name: str, scaled: bool) -> None:
    """In bfloat16, and in float16 with scaled gradients."""
    sample, dtype = case(name), torch.float16 if scaled else torch.bfloat16
    model = lowtide.rematerialize(copy.deepcopy(sample[0]), budget="70%", **WHOLE)
    expected = trained((copy.deepcopy(sample[0]), *sample[1:]), autocast=dtype, scaled=scaled)
    assert equal(trained((model, *sample[1:]), autocast=dtype, scaled=scaled), expected)


def test_parts() -> None:
    torch.manual_seed(0)
    model, x = Deciding(128).to(DEVICE), torch.randn(16, 256, 128, device=DEVICE)
    expected = trained((copy.deepcopy(model), (x,), {}))
    budget = step_peak((copy.deepcopy(model), (x,), {})) * 85 // 100
    budgeted = lowtide.rematerialize(copy.deepcopy(model), budget=budget)
    assert equal(trained((budgeted, (x,), {})), expected)
    assert len(lowtide.plans(budgeted)) == 3
    assert step_peak((budgeted, (x,), {})) <= budget


def test_other_shapes() -> None:
    """Each batch size by a plan of its own, those that are derived from others included, and better plans between calls."""
    torch.manual_seed(0)
    model = Mean(*(Block(128) for _ in range(4))).to(DEVICE)
    plain, budgeted = copy.deepcopy(model), lowtide.rematerialize(copy.deepcopy(model), budget="60%")
    for batch in range(3, 8):
        sample = torch.randn(2 * batch, 256, 128, device=DEVICE)
        assert equal(trained((budgeted, (sample,), {}), 2), trained((plain, (sample,), {}), 2))
    lowtide.wait(budgeted)
    assert equal(trained((budgeted, (sample,), {}), 2), trained((plain, (sample,), {}), 2))
    assert step_peak((budgeted, (sample,), {})) <= lowtide.plans(budgeted)[-1].budget_bytes


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_backend_of_compile(compiler: str) -> None:
    sample = case("transformer")
    expected = trained((copy.deepcopy(sample[0]), *sample[1:]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own
        options = {"budget": "70%", "compiler": compiler}
        model = torch.compile(copy.deepcopy(sample[0]), backend="lowtide", options=options)
        found = trained((model, *sample[1:]))
    if compiler == "eager":
        assert equal(found, expected)
    else:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["transformer", "convolutions", "gpt2-bf16"])
def test_compiled(name: str) -> None:
    """Close results, within the budget."""
    sample = case(name)
    sample[0].apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, nn.Dropout) else None)
    budgeted = of(sample, compiler="inductor", **WHOLE)
    (plan,) = lowtide.plans(budgeted[0])
    for one, other in zip(trained(budgeted), trained(sample), strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-3)
    assert step_peak(budgeted) <= plan.budget_bytes


def test_budgets_of_the_device() -> None:
    """``total_budget`` counts what lies on the device, and no budget is above its memory."""
    sample = case("transformer")
    with pytest.raises(lowtide.PlanError, match="more than the device cuda:0 has"):
        of(sample, budget="4000GiB", **WHOLE)
    model, args, kwargs = sample
    peak = step_peak(sample)
    total = torch.cuda.memory_allocated() + 3 * peak
    budgeted = lowtide.rematerialize(copy.deepcopy(model), args, kwargs, total_budget=total, **WHOLE)
    (plan,) = lowtide.plans(budgeted)
    held = sum(round_up(p.nbytes, DEVICE) for p in model.parameters())
    assert plan.budget_bytes <= total - 3 * held


def test_max_batch() -> None:
    """The batch found trains within the budget, and the search leaves the generators alone."""
    model, args, _ = case("convolutions")
    model(*args).backward()  # cuDNN and cuBLAS have what they keep from here on
    model.zero_grad()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()

    def sample(batch: int) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        return (torch.randn(batch, *args[0].shape[1:], device=DEVICE),), {}

    found = lowtide.max_batch(sample, model, budget=256 << 20)
    assert found.batch > found.batch_without > 0
    assert found.measured_peak_bytes <= 256 << 20
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.cuda.get_rng_state(), states[1])


@pytest.mark.parametrize("name", ["transformer", "convolutions", "gpt2", "unet2d-bf16"])
def test_online(name: str) -> None:
    """Equal to the bit; once every signature was seen, within the budget."""
    sample = case(name)
    plain, again = ((copy.deepcopy(sample[0]), *sample[1:]) for _ in range(2))
    expected = trained(plain)
    peak = lowtide.measure(lambda: trained((copy.deepcopy(sample[0]), *sample[1:]))).peak_bytes
    with lowtide.online(peak * 70 // 100) as session:
        actual = trained((copy.deepcopy(sample[0]), *sample[1:]))
        assert session.statistics.evictions > 0
        settled = lowtide.online(peak * 70 // 100)  # its peak counts from here
        with settled:
            trained(again)
        assert settled.statistics.peak_bytes <= peak * 70 // 100
    assert equal(actual, expected)


def test_a_device_with_less_than_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """A pass that runs out of memory runs again within a lower budget, by the device's own generator."""
    sample = case("transformer")
    expected = trained((copy.deepcopy(sample[0]), *sample[1:]))
    budgeted = of(sample, budget="90%", planner=QUICK)
    (before,) = lowtide.plans(budgeted[0])
    gc.collect()
    torch.cuda.empty_cache()
    free = free_memory(DEVICE)
    assert free is not None
    fill = torch.empty(free - int(0.8 * before.peak_bytes) - (2 << 20), dtype=torch.uint8, device=DEVICE)
    torch.cuda.manual_seed_all(2)
    budgeted[0](*sample[1]).backward()
    assert "ran out of memory" in caplog.text
    (after,) = lowtide.plans(budgeted[0])
    assert after.budget_bytes < before.peak_bytes
    del fill
    budgeted[0].zero_grad()
    torch.cuda.empty_cache()
    assert equal(trained(budgeted), expected)


@pytest.mark.parametrize("name", OWN)
def test_arena(name: str) -> None:
    """What is planned lies in its block from the second step on."""
    sample = case(name)
    expected = trained(copy.deepcopy(sample))
    budgeted = of(sample, arena=True)
    assert equal(trained(budgeted), expected)
    (arena,) = budgeted[0].forward._arenas.values()
    (plan,) = lowtide.plans(budgeted[0])
    placed, taken, _, unexpected = arena.counts
    assert arena.reserved_bytes >= plan.layout.block_bytes and plan.reserved_bytes <= plan.budget_bytes
    assert placed > 50 and taken + unexpected < placed / 10
