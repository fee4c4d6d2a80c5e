"""In-place operators leave a tensor in its layout, which decides what the next operators do and how random numbers fall."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.support.wide import pairs

Change = Callable[[torch.Tensor], torch.Tensor]


def _index(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=torch.long)


WRITES: dict[str, Change] = {
    "masked_fill": lambda x: x.masked_fill_(x > 0.5, 0.0),
    "masked_fill by a row": lambda x: x.masked_fill_(x[:1] > 0.5, torch.tensor(0.0)),
    "masked_scatter": lambda x: x.masked_scatter_(x > 0.5, torch.rand(500)),
    "index_add": lambda x: x.index_add_(1, torch.tensor([0, 2]), torch.ones_like(x[:, :2])),
    "index_copy": lambda x: x.index_copy_(1, torch.tensor([0, 2]), torch.ones_like(x[:, :2])),
    "index_put": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.tensor(1.0)),
    "scatter": lambda x: x.scatter_(1, _index(x), 1.0),
    "scatter_add": lambda x: x.scatter_add_(1, _index(x), torch.ones_like(x)),
    "scatter_reduce": lambda x: x.scatter_reduce_(1, _index(x), torch.ones_like(x), "sum"),
    "tril": lambda x: x.tril_(),
    "cumsum": lambda x: x.cumsum_(1),
    "renorm": lambda x: x.renorm_(2, 0, 1.0),
    "bernoulli": lambda x: x.bernoulli_(0.5) * torch.linspace(0, 1, x.shape[-1]),
    "noise": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "dropout": lambda x: F.dropout(x, inplace=True),
    "alpha dropout": lambda x: F.alpha_dropout(x, training=True),
    "normal": lambda x: x + torch.empty_like(x).normal_(),
}
LAYOUTS: dict[str, Change] = {
    "transposed": lambda h: h.t() * 1.0,
    "a view": lambda h: (h * 1.0).t(),
    "channels last": lambda h: h.view(4, 4, 2, -1).contiguous(memory_format=torch.channels_last) * 1.0,
}


class _Model(nn.Module):
    def __init__(self, write: Change, lay_out: Change) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.write, self.lay_out = write, lay_out

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.write(self.lay_out(self.linear(x).sigmoid()))
        return (y * y.detach().sin()).sum(), y


@pytest.mark.parametrize(("write", "layout"), pairs(WRITES, LAYOUTS))
def test_writes_keep_the_layout(write: str, layout: str) -> None:
    torch.manual_seed(0)
    plain = _Model(WRITES[write], LAYOUTS[layout])
    model, x = copy.deepcopy(plain), torch.randn(8, 12)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    results = []
    for one in (plain, model):
        torch.manual_seed(1)
        loss, y = one(x)
        loss.backward()
        results.append(y)
    assert torch.equal(*results) and results[0].stride() == results[1].stride()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


class _Distances(nn.Module):
    """Its backward pass writes in place to a gradient that the solver returned by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        return torch.logdet(torch.exp(-torch.cdist(h, h)) + torch.eye(len(h), dtype=h.dtype))


def test_a_write_inside_the_backward_pass() -> None:
    torch.manual_seed(0)
    plain = _Distances()
    model, x = copy.deepcopy(plain), torch.randn(40, 8, dtype=torch.float64)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for one in (plain, model):
        one(x).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]
