"""Decisions by integers that are gathered at places which floats decide: the capture knows neither, and must not take what the
kernel of an operator allocates for known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide

_Gather = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class _Deciding(nn.Module):
    def __init__(self, gather: _Gather) -> None:
        super().__init__()
        self.first, self.gather = nn.Linear(16, 16), gather

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        found = self.gather(hidden.sum(-1), labels)
        loss = hidden.square().mean()
        return loss if (found == 0).sum() > 4 else 10 * loss


class _Selecting(_Deciding):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        found = self.gather(hidden.sum(-1), labels)
        return hidden[(found < 2).nonzero().view(-1)].square().sum()


def _pooled(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    places = nn.functional.max_pool1d(scores.view(1, 1, -1), 2, return_indices=True)[1]
    return labels[places.view(-1)]


_GATHERS: dict[str, _Gather] = {
    "argsort": lambda scores, labels: labels[scores.argsort()],
    "topk": lambda scores, labels: labels[scores.topk(20)[1]],
    "index_select": lambda scores, labels: labels.index_select(0, scores.sort()[1]),
    "max_pool": _pooled,
    "compared": lambda scores, labels: labels[scores > 0],
}


@pytest.mark.parametrize("make", [_Deciding, _Selecting], ids=["deciding", "selecting"])
@pytest.mark.parametrize("gather", _GATHERS.values(), ids=_GATHERS)
def test_as_eager(make: Callable[[_Gather], nn.Module], gather: _Gather) -> None:
    torch.manual_seed(0)
    args = torch.randn(40, 16), torch.arange(40) // 2
    found = []
    for planned in (False, True):
        torch.manual_seed(1)
        model = make(gather)
        if planned:
            lowtide.rematerialize(model, args, budget="100%", planner="keep-all")
        for _ in range(2):
            model.zero_grad()
            loss = model(*args)
            loss.backward()
            found.append([loss.detach().clone(), *(each.grad.clone() for each in model.parameters())])
    for eager, own in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, eager, own))
