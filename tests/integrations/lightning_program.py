"""What ``test_lightning`` runs under torchrun: two processes of Lightning's ``ddp``, plain and within a budget."""

from __future__ import annotations

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional

import lowtide
from tests.integrations.launch import say


class Regression(pl.LightningModule):
    def __init__(self, *, planned: bool) -> None:
        super().__init__()
        self.planned = planned
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
            self.model = nn.Sequential(*layers, nn.Linear(64, 1))
            if self.planned:
                lowtide.rematerialize(self.model, budget="60%", planner="auto{effort=1}")

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = functional.mse_loss(self.model(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fit(*, planned: bool) -> Regression:
    torch.manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1))
    module = Regression(planned=planned)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=256))
    assert trainer.world_size == 2
    return module


def main() -> None:
    warnings.simplefilter("ignore")
    ours, reference = fit(planned=True), fit(planned=False)
    assert len(ours.losses) == 4 and ours.losses == reference.losses
    pairs = list(zip(ours.parameters(), reference.parameters(), strict=True))
    assert len(pairs) == 14 and all(torch.equal(a, b) for a, b in pairs)
    (plan,) = lowtide.plans(ours.model)
    assert plan.peak_bytes <= plan.budget_bytes < plan.unconstrained_peak_bytes
    torch.distributed.destroy_process_group()
    say("passed")


if __name__ == "__main__":
    main()
