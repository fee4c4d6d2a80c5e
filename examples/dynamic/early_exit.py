"""A convolutional network that stops early: what a shallow classifier is sure about does not go deeper.

After every block the samples whose prediction is confident leave the batch; when none is left, the rest of the network
does not run. BatchNorm sees the samples that are left. The pictures are pieces of source code, 16 bytes by 16, and the
classes are the modules they are from. Surat Teerapittayanon et al., ICPR 2016, arXiv 1709.01686.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from examples.dynamic.program import Program, library_bytes, seeded, windows

_MODULES = ("heapq", "textwrap", "queue", "shlex")
_SIDE = 16
_CHANNELS, _BLOCKS = 12, 6
_SAMPLES = 32
_CONFIDENCE = 0.45
_LEARNING_RATE = 0.05
_BATCHES = 16


class Block(nn.Module):
    """A residual block, in place wherever that is possible, and a classifier of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(_CHANNELS)
        self.second = nn.Conv2d(_CHANNELS, _CHANNELS, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(_CHANNELS)
        self.head = nn.Linear(_CHANNELS, len(_MODULES))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first_norm(self.first(x)).relu_()
        result = self.second_norm(self.second(hidden)).add_(x).relu_()
        return result, self.head(result.mean(dim=(2, 3)))


class EarlyExit(nn.Module):
    """``forward(pictures, labels)``: the mean loss of all classifiers over the samples that reach them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, _CHANNELS, 3, padding=1, bias=False), nn.BatchNorm2d(_CHANNELS), nn.ReLU(inplace=True)
        )
        self.blocks = nn.ModuleList(Block() for _ in range(_BLOCKS))

    def forward(self, pictures: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The loss and the number of blocks that ran."""
        x, losses = self.stem(pictures), []
        for block in self.blocks:
            x, scores = block(x)
            losses.append(F.cross_entropy(scores, labels))
            unsure = scores.detach().softmax(dim=1).amax(dim=1) < _CONFIDENCE
            if unsure.sum().item() < 2:
                break
            x, labels = x[unsure], labels[unsure]
        return torch.stack(losses).mean(), len(losses)


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 32 pictures in a step."""
    with seeded(seed):
        model = EarlyExit()
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9, weight_decay=1e-4)
    pictures, labels = _data(_BATCHES, _SAMPLES * size, seed)

    def step(index: int) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        loss, depth = model(pictures[index % _BATCHES], labels[index % _BATCHES])
        loss.backward()
        optimizer.step()
        return loss.detach(), torch.tensor(depth)

    return Program("early_exit", (model,), (optimizer,), step)


def _data(batches: int, samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (batches, samples, 1, side, side) with values around 0, labels (batches, samples)."""
    count = batches * samples
    pieces = torch.stack([windows(library_bytes(name), count, _SIDE**2, seed) for name in _MODULES])
    labels = torch.randint(0, len(_MODULES), (count,), generator=torch.Generator().manual_seed(seed))
    chosen = pieces[labels, torch.arange(count)].float().sub_(80).div_(40)
    return chosen.view(batches, samples, 1, _SIDE, _SIDE), labels.view(batches, samples)
