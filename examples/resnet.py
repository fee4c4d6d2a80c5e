"""A ResNet with BatchNorm on generated images, inside 70 % of its memory: ``python examples/resnet.py``.

The statistics of BatchNorm are updated once per step, whatever is computed again.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

import lowtide

BATCH, SIZE, CLASSES, STEPS = 16, 64, 4, 10


def images() -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes of four widths under noise, and which width it is."""
    labels = torch.randint(CLASSES, (BATCH,))
    stripes = torch.sin(torch.arange(SIZE) * (labels[:, None] + 1) / 4)
    return stripes[:, None, None, :] + 0.5 * torch.randn(BATCH, 3, SIZE, SIZE), labels


def main() -> None:
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], layer_type="bottleneck", num_labels=CLASSES
    )
    model = ResNetForImageClassification(config).train()
    pixels, labels = images()
    lowtide.rematerialize(model, (), {"pixel_values": pixels, "labels": labels}, budget="70%")
    print(lowtide.plans(model)[0])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        pixels, labels = images()
        optimizer.zero_grad(set_to_none=True)
        loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}: loss {loss.item():.4f}")
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    print(f"batches seen by BatchNorm: {norm.num_batches_tracked}")


if __name__ == "__main__":
    main()
