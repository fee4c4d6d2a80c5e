"""A character-level LSTM over lines of source code, each as long as it is.

The lines of a batch are sorted by length, and a line that has ended leaves the loop: the number of time steps and the
number of rows in each of them depend on the data. The output layer shares its weight with the embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from examples.dynamic.program import Program, library_text, seeded

_MODULES = ("textwrap", "heapq")
_ALPHABET = 128  # ASCII; other characters become 0
_WIDTH = 32
_LINES = 24
_LEARNING_RATE = 5e-3
_LARGEST_NORM = 1.0


class LineModel(nn.Module):
    """``forward(lines)``: the mean loss per character of lines sorted by length, longest first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_ALPHABET, width)
        self.cell = nn.LSTMCell(width, width)
        self.dropout = nn.Dropout(0.2)
        self.decoder = nn.Linear(width, _ALPHABET)
        self.decoder.weight = self.embedding.weight

    def forward(self, lines: list[torch.Tensor]) -> torch.Tensor:
        hidden = cell = torch.zeros(len(lines), self.cell.hidden_size)
        total, characters = torch.zeros(()), 0
        for time in range(len(lines[0]) - 1):
            running = [line for line in lines if len(line) > time + 1]
            current, following = (torch.stack([line[at] for line in running]) for at in (time, time + 1))
            states = hidden[: len(running)], cell[: len(running)]
            hidden, cell = self.cell(self.dropout(self.embedding(current)), states)
            total = total + F.cross_entropy(self.decoder(hidden), following, reduction="sum")
            characters += len(running)
        return total / characters


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 24 lines in a step."""
    with seeded(seed):
        model = LineModel(_WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    batches = _batches(_LINES * size)

    def step(index: int) -> tuple[torch.Tensor, ...]:
        optimizer.zero_grad()
        loss = model(batches[index % len(batches)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), _LARGEST_NORM)
        optimizer.step()
        return (loss.detach(),)

    return Program("lstm", (model,), (optimizer,), step)


def _batches(lines: int) -> list[list[torch.Tensor]]:
    """Lines in their order in the sources, cut into batches and sorted by length within each."""
    texts = [line for source in library_text(*_MODULES) for line in source.splitlines(keepends=True) if len(line) > 1]
    encoded = [torch.tensor([ord(c) if ord(c) < _ALPHABET else 0 for c in text]) for text in texts]
    starts = range(0, max(len(encoded) - lines, 0) + 1, lines)
    return [sorted(encoded[start : start + lines], key=len, reverse=True) for start in starts]
