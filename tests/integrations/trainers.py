"""Small models and data for the trainers, and one training of each with and without lowtide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import lowtide
from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
from lowtide.integrations.transformers import LowtideCallback
from tests.support.training import QUICK

SHAPE = Shape(layers=3, width=64, heads=2, context=64, batch=4)
BUDGET = "40%"
PLANNER = QUICK
RESERVE = 64  # bytes of the trainers' own beside a pass: a loss that is divided, a count of labels


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dictionaries of tensors, row by row."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def text(rows: int, shape: Shape = SHAPE) -> Rows:
    """Windows of the standard library's sources, inputs and labels alike."""
    batches = draw_batches(load_corpus(200_000), shape, -(-rows // shape.batch))
    windows = torch.cat(batches)[:rows]
    return Rows(input_ids=windows, labels=windows)


def gpt2() -> nn.Module:
    return build_model(SHAPE)


@dataclass(frozen=True, slots=True)
class Trained:
    """A finished training: ``losses`` as logged at every step, ``peaks`` per step where lowtide ran."""

    trainer: Any
    model: nn.Module
    losses: list[float]
    peaks: list[int]


def train(
    make_model: Callable[[], nn.Module],
    folder: Path,
    data: Rows,
    *,
    planned: bool,
    steps: int = 20,
    budget: str = BUDGET,
    trainer_class: Any = transformers.Trainer,
    arguments_class: Any = transformers.TrainingArguments,
    resume: bool | str = False,
    data_for_evaluation: Rows | None = None,
    **arguments: Any,
) -> Trained:
    """Train with a Hugging Face trainer under one seed."""
    torch.manual_seed(0)
    model = make_model()
    callback = LowtideCallback()
    if planned:
        lowtide.rematerialize(model, budget=budget, planner=PLANNER, reserve=RESERVE)
    defaults = {
        "per_device_train_batch_size": SHAPE.batch, "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "seed": 0, "dataloader_pin_memory": False,
    }  # fmt: skip
    settings = arguments_class(output_dir=str(folder), max_steps=steps, **{**defaults, **arguments})
    trainer = trainer_class(
        model=model, args=settings, train_dataset=data, eval_dataset=data_for_evaluation, callbacks=[callback]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(trainer, model, losses, [peak for _, peak in callback.history])


def assert_same_training(ours: Trained, reference: Trained) -> None:
    """Losses and final parameters and buffers equal to the bit, and every measured peak within some plan's budget."""
    assert ours.losses == reference.losses
    assert_same_state(ours.model, reference.model)
    plans = lowtide.plans(ours.model)
    assert plans
    assert ours.peaks
    assert max(ours.peaks) <= max(plan.budget_bytes for plan in plans) + RESERVE


def assert_same_state(ours: nn.Module, reference: nn.Module) -> None:
    mine, theirs = ours.state_dict(), reference.state_dict()
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different
