"""Updates inside of backward passes under Lightning and transformers' Trainer: equal to the bit, accumulation too."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lowtide
from lowtide.ir.graph import OPTIMIZER_TARGET
from tests.support.networks import WIDTH, WithLoss, perceptron

Trained = tuple[nn.Module, torch.optim.Optimizer]


def _made(planned: bool) -> Trained:
    torch.manual_seed(0)
    model = WithLoss(perceptron(3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    if planned:
        lowtide.rematerialize(model, budget="100%", planner="greedy", optimizer=optimizer)
    return model, optimizer


def _batches() -> list[torch.Tensor]:
    return [torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(8)]


def _assert_same(one: Trained, two: Trained, accumulates: bool) -> None:
    for ours, theirs in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert str(one[1].state_dict()["state"]) == str(two[1].state_dict()["state"])
    updates = [sum(op.target == OPTIMIZER_TARGET for op in plan.graph.ops) for plan in lowtide.plans(two[0])]
    assert updates == ([0, 6] if accumulates else [6])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("passes", [1, 3])
def test_lightning(passes: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, planned: bool) -> None:
            super().__init__()
            self.made = _made(planned)
            self.model, self.planned = self.made[0], planned

        def configure_optimizers(self) -> Any:
            optimizer = self.made[1]
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            more = self.planned and (batch_idx + 1) % self.trainer.accumulate_grad_batches != 0
            with lowtide.accumulating(self.model) if more else contextlib.nullcontext():
                loss: torch.Tensor = self.model(batch)
            return loss

    found = []
    for planned in (False, True):
        module = Module(planned)
        quiet: Any = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", accumulate_grad_batches=passes, default_root_dir=tmp_path, **quiet
        )
        trainer.fit(module, DataLoader(_batches(), batch_size=None))  # type: ignore[arg-type]
        found.append(module.made)
    _assert_same(found[0], found[1], passes > 1)


class _Named(nn.Module):
    """Takes and returns what a ``Trainer`` expects."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(x)}


@pytest.mark.parametrize("passes", [1, 2])
def test_trainer(passes: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):  # type: ignore[misc, name-defined]
        def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
            return 0.0

    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model = _Named(WithLoss(perceptron(3)))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="greedy", optimizer=optimizer)
        args = transformers.TrainingArguments(
            str(tmp_path), max_steps=4, per_device_train_batch_size=24, gradient_accumulation_steps=passes,
            max_grad_norm=0.0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
            remove_unused_columns=False,
        )  # fmt: skip
        rows = [{"x": row} for batch in _batches() for row in batch]
        Trainer(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None)).train()
        found.append((model, optimizer))
    _assert_same(found[0], found[1], passes > 1)
