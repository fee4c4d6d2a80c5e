"""GPT-2 on real text inside a budget: two lines differ from a plain training loop.

Run it with ``python examples/gpt2.py``. The text is the standard library's own sources, byte by byte, and the model has random
weights, so that nothing is downloaded; replace it with ``GPT2LMHeadModel.from_pretrained("gpt2")`` for real work.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide

BATCH, LENGTH, STEPS = 4, 128, 20


def text() -> torch.Tensor:
    """The standard library's modules, one after the other, as byte values."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in modules)), dtype=torch.uint8).long()


def main() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    )
    model.train()
    corpus = text()
    starts = torch.randint(len(corpus) - LENGTH, (STEPS, BATCH))
    batches = corpus[starts[..., None] + torch.arange(LENGTH)]
    sample = {"input_ids": batches[0], "labels": batches[0]}

    lowtide.rematerialize(model, (), sample, budget="40%")  # the first line: plan, and swap the forward in place
    print(lowtide.plans(model)[0])  # the second, if you like to know

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
