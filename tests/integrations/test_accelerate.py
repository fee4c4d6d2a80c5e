"""``accelerate`` around rematerialized models: prepare, accumulation, mixed precision, state saving, unwrapping."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import diffusers
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import lowtide
from tests.integrations.trainers import BUDGET, PLANNER, assert_same_state, gpt2, text

_STEPS = 8


@pytest.fixture(autouse=True)
def _no_state_left() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def _accelerator(precision: str) -> accelerate.Accelerator:
    AcceleratorState._reset_state()
    return accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)


def _prepared(accelerator: accelerate.Accelerator, *, planned: bool) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = gpt2()
    if planned:
        lowtide.rematerialize(model, budget=BUDGET, planner=PLANNER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(text(4 * _STEPS), batch_size=4)
    return accelerator.prepare(model, optimizer, loader)


def _train(accelerator: accelerate.Accelerator, prepared: tuple[Any, Any, Any], steps: range) -> list[float]:
    model, optimizer, loader = prepared
    losses = []
    for index, batch in enumerate(loader):
        if index not in steps:
            continue
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _in_two_halves(folder: Path, precision: str, *, planned: bool) -> tuple[nn.Module, list[float]]:
    """Half of a training, its state saved and loaded into a new model, the other half."""
    first = _accelerator(precision)
    begun = _prepared(first, planned=planned)
    losses = _train(first, begun, range(_STEPS // 2))
    first.save_state(str(folder), safe_serialization=False)
    second = _accelerator(precision)
    finished = _prepared(second, planned=planned)
    second.load_state(str(folder))
    return finished[0], losses + _train(second, finished, range(_STEPS // 2, _STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accumulation_and_saved_state(tmp_path: Path, precision: str) -> None:
    reference, expected = _in_two_halves(tmp_path / "plain", precision, planned=False)
    model, losses = _in_two_halves(tmp_path / "planned", precision, planned=True)
    assert losses == expected
    assert_same_state(model, reference)
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in lowtide.plans(model))


def test_wrapping_for_mixed_precision_and_unwrapping() -> None:
    """The plan is found below accelerate's wrapper; unwrapped, the model can be copied, trained and restored."""
    accelerator = _accelerator("bf16")
    model, optimizer, loader = _prepared(accelerator, planned=True)
    _train(accelerator, (model, optimizer, loader), range(2))
    assert len(lowtide.plans(model)) == 1
    with pytest.raises(lowtide.PlanError, match="already"):
        lowtide.rematerialize(model, budget=BUDGET)
    with pytest.raises(lowtide.PlanError, match="wrapped"):
        lowtide.restore(model)
    batch = next(iter(loader))
    unwrapped: nn.Module = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    unwrapped(**batch).loss.backward()
    clone = copy.deepcopy(unwrapped)
    clone(**batch).loss.backward()
    assert clone.lm_head.weight.grad is not unwrapped.lm_head.weight.grad
    lowtide.restore(unwrapped)
    unwrapped(**batch).loss.backward()


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8, dropout=0.1,
    ).train()  # fmt: skip


def _denoise(*, planned: bool, steps: int) -> tuple[nn.Module, list[float], list[int]]:
    """Training steps as in diffusers' own script: noise is added by a scheduler and predicted."""
    torch.manual_seed(0)
    accelerator = _accelerator("no")
    model = _unet()
    if planned:
        lowtide.rematerialize(model, budget="60%", planner=PLANNER)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    losses, peaks = [], []
    for _ in range(steps):
        clean, noise = torch.randn(2, 4, 3, 16, 16)
        times = torch.randint(0, 100, (4,))
        noisy = scheduler.add_noise(clean, noise, times)

        def compute(noisy: torch.Tensor = noisy, times: torch.Tensor = times, noise: torch.Tensor = noise) -> None:
            loss = nn.functional.mse_loss(model(noisy, times).sample, noise)
            accelerator.backward(loss)
            losses.append(loss.item())

        peaks.append(lowtide.measure(compute).peak_bytes)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, peaks


@pytest.mark.slow
def test_diffusers_unet() -> None:
    reference, expected, _ = _denoise(planned=False, steps=5)
    model, losses, peaks = _denoise(planned=True, steps=5)
    assert losses == expected
    assert_same_state(model, reference)
    (plan,) = lowtide.plans(model)
    loss_bytes = 3 * 4 * 4 * 3 * 16 * 16  # outside the model: the difference's gradient and what mse_loss takes
    assert max(peaks[1:]) <= plan.budget_bytes + loss_bytes
