"""T5 learns to copy text backwards, inside 50 % of its memory: ``python examples/t5.py``."""

from __future__ import annotations

import torch
from transformers import T5Config, T5ForConditionalGeneration

import lowtide

BATCH, LENGTH, STEPS = 8, 48, 20


def main() -> None:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=128,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config).train()
    lowtide.rematerialize(model, budget="50%")  # no sample: planned at the first call

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        source = torch.randint(1, 128, (BATCH, LENGTH))
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=source, labels=source.flip(1)).loss
        loss.backward()
        optimizer.step()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    (plan,) = lowtide.plans(model)
    print(f"peak {plan.peak_bytes} of {plan.unconstrained_peak_bytes} bytes at {100 * plan.overhead:.1f} % more time")


if __name__ == "__main__":
    main()
