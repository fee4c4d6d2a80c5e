"""Lightning inside 40 % of the memory: ``python examples/with_lightning.py``."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from gpt2 import text
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide
from lowtide.integrations.pytorch_lightning import LowtideCallback

LENGTH, STEPS = 128, 10


class Language(pl.LightningModule):
    """The model is made, and rematerialized, where Lightning wants models to be made."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
            self.model = lowtide.rematerialize(GPT2LMHeadModel(config).train(), budget="40%")

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (window,) = batch
        loss: torch.Tensor = self.model(input_ids=window, labels=window).loss
        print(f"step {index + 1}: loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    pl.seed_everything(0)
    corpus = text()
    windows = corpus[: len(corpus) // LENGTH * LENGTH].view(-1, LENGTH)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(windows), batch_size=4, shuffle=True)
    callback = LowtideCallback()
    trainer = pl.Trainer(
        accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[callback],
    )  # fmt: skip
    module = Language()
    trainer.fit(module, loader)
    (plan,) = lowtide.plans(module.model)
    print(f"measured peak {max(peak for _, peak in callback.history)} bytes, budget {plan.budget_bytes}")


if __name__ == "__main__":
    main()
