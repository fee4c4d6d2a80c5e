"""Hugging Face's Trainer on a small GPT-2."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

LENGTH = 32


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = torch.randint(256, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": window, "labels": window}


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=3, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, num_train_epochs=1, logging_steps=1, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, eval_strategy="epoch",
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Windows(), eval_dataset=Windows())
        trainer.remove_callback(PrinterCallback)  # it prints times
        trainer.train()
    for entry in trainer.state.log_history:
        print(
            {name: value for name, value in entry.items() if name in ("loss", "grad_norm", "eval_loss", "train_loss")}
        )


if __name__ == "__main__":
    main()
