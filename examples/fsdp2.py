"""Two processes, parameters sharded block by block: ``torchrun --standalone --nproc-per-node=2 examples/fsdp2.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt2 import text
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide

BATCH, LENGTH, STEPS = 4, 128, 5


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    corpus = text()
    starts = torch.randint(len(corpus) - LENGTH, (STEPS, BATCH))
    batches = corpus[starts[..., None] + torch.arange(LENGTH)]

    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    sample = {"input_ids": batches[0], "labels": batches[0]}
    lowtide.rematerialize(model, (), sample, budget="30%")  # of what the sharded model takes without a plan
    (plan,) = lowtide.plans(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in enumerate(batches):

        def compute(batch: torch.Tensor = batch) -> None:
            model(input_ids=batch, labels=batch).loss.backward()

        measured = lowtide.measure(compute)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"rank {rank}, step {step + 1}: peak {measured.peak_bytes}, predicted at most {plan.peak_bytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
