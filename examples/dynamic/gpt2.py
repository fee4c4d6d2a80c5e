"""A Hugging Face GPT-2 called plainly, with another sequence length in every batch.

The model has random weights, so that nothing is downloaded. A step accumulates gradients over two batches.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.dynamic.program import Program, library_bytes, seeded, windows

_BYTES = 128
_LENGTHS = (40, 64, 23, 57, 64, 31)
_WIDTH, _LAYERS, _HEADS = 48, 3, 4
_SEQUENCES = 16
_ACCUMULATED = 2
_LEARNING_RATE = 1e-3


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 16 sequences in each of the two batches of a step."""
    config = GPT2Config(
        vocab_size=_BYTES,
        n_positions=max(_LENGTHS),
        n_embd=_WIDTH,
        n_layer=_LAYERS,
        n_head=_HEADS,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with seeded(seed):
        model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    text = library_bytes("heapq", "textwrap").clamp_(max=_BYTES - 1)
    batches = [windows(text, _SEQUENCES * size, length, seed + number) for number, length in enumerate(_LENGTHS)]

    def step(index: int) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        losses = []
        for number in range(_ACCUMULATED):
            batch = batches[(_ACCUMULATED * index + number) % len(batches)]
            loss = model(input_ids=batch, labels=batch).loss / _ACCUMULATED
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return tuple(losses)

    return Program("gpt2", (model,), (optimizer,), step)
