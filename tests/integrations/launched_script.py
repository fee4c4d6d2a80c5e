"""A training script as people write it, which ``test_launchers`` starts: ``accelerate`` shards the model, or the script itself.

Each rank writes its losses into a file of the folder that is given."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
from tests.integrations.sharding import on_cpus

_SHAPE = Shape(layers=3, width=64, heads=2, context=64, batch=4)


def losses_of(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[float]:
    losses = []
    torch.manual_seed(rank)
    for batch in draw_batches(load_corpus(200_000), _SHAPE, 3, seed=rank):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_accelerate() -> list[float]:
    with on_cpus():
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.is_fsdp2
        model = build_model(_SHAPE)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        return losses_of(model, optimizer, accelerator.process_index)


def by_itself() -> list[float]:
    dist.init_process_group("gloo")
    model: Any = build_model(_SHAPE)
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    return losses_of(model, torch.optim.AdamW(model.parameters(), lr=1e-3), dist.get_rank())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--by", choices=("accelerate", "itself"))
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    losses = by_accelerate() if given.by == "accelerate" else by_itself()
    (given.folder / f"{dist.get_rank()}").write_text(repr(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
