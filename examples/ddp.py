"""Two processes under DistributedDataParallel: ``torchrun --standalone --nproc-per-node=2 examples/ddp.py``.

The plan is made once, by the rank that asks first, and is the same on both.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt2 import text
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

import lowtide

BATCH, LENGTH, STEPS = 4, 128, 6


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(rank)
    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, use_cache=False)
    inner = GPT2LMHeadModel(config).train().to(device)
    model = DistributedDataParallel(lowtide.rematerialize(inner, budget="40%"))  # in this order

    corpus = text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        starts = torch.randint(len(corpus) - LENGTH, (BATCH,))
        batch = corpus[starts[:, None] + torch.arange(LENGTH)].to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        print(f"rank {rank}, step {step + 1}: loss {loss.item():.4f}")
    (plan,) = lowtide.plans(inner)
    print(f"rank {rank}: peak {plan.peak_bytes} of {plan.unconstrained_peak_bytes} bytes, overhead {plan.overhead:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
