"""Hugging Face's Trainer inside 40 % of the memory: ``python examples/trainer.py``."""

from __future__ import annotations

import tempfile

import torch
from gpt2 import text
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import lowtide
from lowtide.integrations.transformers import LowtideCallback

LENGTH, STEPS = 128, 10


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Stretches of the standard library's sources."""

    def __init__(self) -> None:
        self.corpus = text()

    def __len__(self) -> int:
        return len(self.corpus) // LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.corpus[index * LENGTH : (index + 1) * LENGTH]
        return {"input_ids": window, "labels": window}


def main() -> None:
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    model = lowtide.rematerialize(GPT2LMHeadModel(config), budget="40%")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, max_steps=STEPS, logging_steps=2, report_to=[], use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Windows(), callbacks=[LowtideCallback()])
        trainer.train()
    for entry in trainer.state.log_history:
        if "lowtide_measured_peak_mib" in entry:
            print({name: value for name, value in entry.items() if name == "loss" or name.startswith("lowtide")})


if __name__ == "__main__":
    main()
