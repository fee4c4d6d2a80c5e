"""Lightning's trainer on models rematerialized in ``configure_model``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

import lowtide
from lowtide.integrations.pytorch_lightning import LowtideCallback
from tests.integrations.launch import torchrun
from tests.integrations.trainers import BUDGET, PLANNER, assert_same_state, gpt2, text

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


class Language(pl.LightningModule):
    """GPT-2, made and planned where Lightning wants models to be made."""

    def __init__(self, *, planned: bool) -> None:
        super().__init__()
        self.planned = planned
        self.model: Any = None
        self.losses: list[float] = []
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = gpt2()
        if self.planned:
            lowtide.rematerialize(self.model, budget=BUDGET, planner=PLANNER)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.model(**batch).loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _fit(
    folder: Path, *, planned: bool, steps: int, resume: Path | None = None, **options: Any
) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    module, callback = Language(planned=planned), LowtideCallback()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=steps, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback], num_sanity_val_steps=0, **options,
    )  # fmt: skip
    train, held_out = (torch.utils.data.DataLoader(text(rows), batch_size=4) for rows in (30, 8))
    trainer.fit(module, train, held_out, ckpt_path=resume)
    return trainer, module, callback


def test_twenty_steps_of_gpt2(tmp_path: Path) -> None:
    """With dropout, at 40 % of the peak, validated after every epoch; the last batch of every epoch is short."""
    trainer, ours, callback = _fit(tmp_path, planned=True, steps=20, enable_checkpointing=False)
    _, reference, _ = _fit(tmp_path, planned=False, steps=20, enable_checkpointing=False)
    assert len(ours.losses) == 20
    assert ours.losses == reference.losses
    assert ours.validated == reference.validated
    assert_same_state(ours, reference)
    plans = lowtide.plans(ours.model)
    peaks = [peak for _, peak in callback.history]
    assert len(peaks) == 20 - len(plans)
    assert 0 < max(peaks) <= max(plan.budget_bytes for plan in plans)
    assert 0 < trainer.callback_metrics["lowtide_measured_peak_mib"] <= trainer.callback_metrics["lowtide_budget_mib"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.5}]
)
def test_options(tmp_path: Path, options: dict[str, Any]) -> None:
    (_, ours, _), (_, reference, _) = (
        _fit(tmp_path, planned=planned, steps=6, enable_checkpointing=False, **options) for planned in (True, False)
    )
    assert ours.losses == reference.losses
    assert_same_state(ours, reference)


@pytest.mark.slow
def test_checkpoints_and_resuming(tmp_path: Path) -> None:
    """A checkpoint of a planned run is resumed by a planned one as a plain checkpoint is by a plain one."""
    resumed = []
    for planned in (True, False):
        trainer, _, _ = _fit(tmp_path / f"{planned}", planned=planned, steps=8)
        path = tmp_path / f"{planned}.ckpt"
        trainer.save_checkpoint(path)
        resumed.append(_fit(tmp_path / f"{planned}", planned=planned, steps=14, resume=path)[1])
    ours, reference = resumed
    assert len(ours.losses) == 6
    assert ours.losses == reference.losses
    assert_same_state(ours, reference)
    loaded = Language.load_from_checkpoint(tmp_path / "True.ckpt", planned=False)
    assert loaded.model is not None


@pytest.mark.slow
def test_two_processes() -> None:
    assert torchrun("tests.integrations.lightning_program").count("passed") == 2
