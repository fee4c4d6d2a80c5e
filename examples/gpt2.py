"""Fine-tuning GPT-2 inside a budget: two lines differ from a plain training loop.

Run it with ``python examples/gpt2.py``. The model has random weights, so that nothing is downloaded; replace it with
``GPT2LMHeadModel.from_pretrained("gpt2")`` for real work.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide

BATCH, LENGTH, STEPS = 4, 128, 5


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=1000, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    )
    model.train()
    batches = torch.randint(0, 1000, (STEPS, BATCH, LENGTH))
    sample = {"input_ids": batches[0], "labels": batches[0]}

    lowtide.rematerialize(model, (), sample, budget="40%")  # the first line: plan, and swap the forward in place
    print(lowtide.plans(model)[0])  # the second, if you like to know

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
