"""How large a batch fits, with lowtide and without: a ResNet-50 on small pictures.

Run it with ``python examples/max_batch.py [BUDGET]``, by default 1 GiB for parameters, gradients, two optimizer states per
parameter, inputs and the pass together. No data and no weights are needed.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import lowtide

PIXELS, CLASSES = 96, 1000


def make_sample(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with ``batch`` pictures."""
    pictures = torch.randn(batch, 3, PIXELS, PIXELS)
    return (), {"pixel_values": pictures, "labels": torch.randint(0, CLASSES, (batch,))}


def main() -> None:
    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_labels=CLASSES)).train()
    budget = sys.argv[1] if len(sys.argv) > 1 else "1GiB"
    found = lowtide.max_batch(make_sample, model, total_budget=budget)
    print(found)
    print(f"{found.gain:.1f} times the batch in the same memory")

    args, kwargs = make_sample(found.batch)
    lowtide.rematerialize(model, args, kwargs, total_budget=budget, planner=found.plan.planner)
    loss = model(*args, **kwargs).loss
    loss.backward()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
