"""A mixture of experts: a router sends every token to its best one or two experts, and no two batches run the same.

Which experts run, and on how many tokens, is known only after the router's result. The layers predict a byte from the
eight before it. Noam Shazeer et al., ICLR 2017, arXiv 1701.06538.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from examples.dynamic.program import Program, library_bytes, seeded, windows

_BYTES = 128
_CONTEXT = 8
_WIDTH, _HIDDEN, _EXPERTS = 32, 64, 4
_CHOICES = (2, 1, 2)  # experts per token, layer by layer
_TOKENS = 1024
_BALANCE = 0.01
_LEARNING_RATE = 3e-3
_BATCHES = 16


class Experts(nn.Module):
    """``forward(x)``: (tokens, width) after the chosen experts, and the loss that keeps the experts evenly used."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.norm = nn.LayerNorm(_WIDTH)
        self.router = nn.Linear(_WIDTH, _EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(_WIDTH, _HIDDEN), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(_HIDDEN, _WIDTH)
            )
            for _ in range(_EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.norm(x)
        chances = self.router(tokens).softmax(dim=-1)
        weights, chosen = chances.topk(self.choices, dim=-1)
        result = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows, ranks = torch.where(chosen == number)
            answer = self.experts[number](tokens[rows])
            result.index_add_(0, rows, answer * weights[rows, ranks, None])
        shares = F.one_hot(chosen[:, 0], _EXPERTS).float().mean(dim=0)
        return result.add_(x), _EXPERTS * (shares * chances.mean(dim=0)).sum()


class ByteModel(nn.Module):
    """``forward(context)``: scores for the next byte, and the balance of all layers; ``context`` is (tokens, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_BYTES, _WIDTH // _CONTEXT)
        self.layers = nn.ModuleList(Experts(choices) for choices in _CHOICES)
        self.head = nn.Linear(_WIDTH, _BYTES)

    def forward(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embedding(context).flatten(1)
        balance = torch.zeros(())
        for layer in self.layers:
            x, share = layer(x)
            balance = balance + share
        return self.head(x), balance


def make(size: int = 1, seed: int = 0) -> Program:
    """``size`` times 1024 tokens in a step."""
    with seeded(seed):
        model = ByteModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE)
    tokens = _TOKENS * size
    data = windows(library_bytes("heapq", "textwrap").clamp_(max=_BYTES - 1), _BATCHES * tokens, _CONTEXT + 1, seed)
    batches = data.view(_BATCHES, tokens, _CONTEXT + 1)

    def step(index: int) -> tuple[torch.Tensor, ...]:
        batch = batches[index % _BATCHES]
        optimizer.zero_grad()
        scores, balance = model(batch[:, :-1])
        loss = F.cross_entropy(scores, batch[:, -1])
        (loss + _BALANCE * balance).backward()
        optimizer.step()
        return loss.detach(), balance.detach()

    return Program("experts", (model,), (optimizer,), step)
