"""Results that share memory: views of each other or of an argument, and the same detached; gradients come for any of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.support.wide import pairs

Tensors = tuple[torch.Tensor, ...]


class _Reverse(torch.autograd.Function):
    """A view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -3 * gradient


def _reverse(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Reverse.apply(x)  # type: ignore[no-untyped-call]
    return result


def _written(h: torch.Tensor) -> Tensors:
    h = h * 1
    return h[0].mul_(2), h


def _complex(h: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(h.view(4, 8, 2))


def _spectrum(h: torch.Tensor) -> Tensors:
    z = torch.fft.fft(h)
    return z, z.real, z.conj().imag, z.conj(), z.mT.conj(), torch.view_as_real(z)


def _detached_view(h: torch.Tensor) -> Tensors:
    flat = h.view(-1)
    return flat, flat.detach(), flat[3:5]


SHARING: dict[str, Callable[[torch.Tensor, torch.Tensor], Tensors]] = {
    "a row": lambda h, x: (h, h[0]),
    "a row before": lambda h, x: (h[0], h),
    "two views": lambda h, x: (h.t(), h[0]),
    "the same again": lambda h, x: (h, h.view_as(h), h.view_as(h)),
    "overlapping": lambda h, x: (h.diagonal(), h[1:, 1:], h.detach().t()),
    "expanded": lambda h, x: (h[:, :1].expand(4, 5), h),
    "written in part": lambda h, x: _written(h),
    "detached": lambda h, x: (h, h.detach()),
    "a detached view": lambda h, x: _detached_view(h),
    "other type": lambda h, x: (h.view(-1), h.detach().view(torch.int32)),
    "chunks": lambda h, x: h.chunk(2, -1),
    "the whole and chunks": lambda h, x: (h, *h.chunk(2, -1)),
    "chunks and views": lambda h, x: (h, h.t(), *h.chunk(2, -1)),
    "a chunk detached": lambda h, x: (*(chunks := h.chunk(2, -1)), chunks[0].detach()),
    "views of an argument": lambda h, x: (h, x[0], x.t(), x.detach()),
    "chunks of an argument": lambda h, x: (h.sum(), *x.unbind(0)),
    "parts of an argument": lambda h, x: (h, _complex(x).conj(), _complex(x).conj().imag),
    "reversed": lambda h, x: (h, _reverse(h)),
    "a view of reversed": lambda h, x: (_reverse(h).t(), h[1]),
    "an argument reversed": lambda h, x: (h, _reverse(x)),
    "a view of an argument reversed": lambda h, x: (h, _reverse(x).view(-1)),
    "complex": lambda h, x: (h, _complex(h), _complex(h).imag),
    "spectrum": lambda h, x: _spectrum(h),
}


class _Model(nn.Module):
    def __init__(self, sharing: str, with_loss: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.sharing = sharing
        self.with_loss = with_loss

    def forward(self, x: torch.Tensor) -> Tensors:
        h = self.linear(x)
        loss = (h.square().mean(),) if self.with_loss else ()
        return (*loss, *SHARING[self.sharing](h, x))


def _weighted(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return (real * torch.linspace(-1, 1, real.numel()).view(real.shape)).sum()


@pytest.mark.parametrize(("sharing", "with_loss"), pairs(SHARING, (True, False)))
def test_gradients_for_some_of_the_results(sharing: str, with_loss: bool) -> None:
    torch.manual_seed(0)
    plain = _Model(sharing, with_loss)
    model, x = copy.deepcopy(plain), torch.randn(4, 16)
    lowtide.rematerialize(model, (x.clone().requires_grad_(),), budget="100%", planner="keep-all")
    able = [i for i, tensor in enumerate(plain(x.clone().requires_grad_())) if tensor.requires_grad]
    for chosen in [able, *itertools.combinations(able, 1), able[-2:], able]:
        gradients = []
        for one in (plain, model):
            one.zero_grad()
            own = x.clone().requires_grad_()
            results = one(own)
            torch.stack([_weighted(results[i]) for i in chosen]).sum().backward()
            gradients.append([own.grad, *(p.grad for p in one.parameters())])
        for mine, its in zip(gradients[1], gradients[0], strict=True):
            assert (mine is None) == (its is None)
            assert its is None or torch.equal(mine, its)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharing", SHARING)
def test_results_are_as_in_eager(sharing: str) -> None:
    torch.manual_seed(0)
    plain = _Model(sharing, True)
    model, x = copy.deepcopy(plain), torch.randn(4, 16)
    lowtide.rematerialize(model, (x.clone().requires_grad_(),), budget="100%", planner="keep-all")
    for _ in range(2):
        theirs, ours = plain(x.clone().requires_grad_()), model(x.clone().requires_grad_())
        for its, mine in zip(theirs, ours, strict=True):
            assert mine.dtype == its.dtype and mine.requires_grad == its.requires_grad
            assert mine.stride() == its.stride() and mine.is_conj() == its.is_conj() and mine.is_neg() == its.is_neg()
            assert torch.equal(mine, its)
        for i, j in itertools.combinations(range(len(theirs)), 2):
            places = [[r[k].untyped_storage().data_ptr() for k in (i, j)] for r in (theirs, ours)]
            assert (places[0][0] == places[0][1]) == (places[1][0] == places[1][1])


@pytest.mark.parametrize(("written", "read"), [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("sharing", ["a row", "a row before", "two views"])
def test_a_write_into_one_result_reaches_the_others(sharing: str, written: int, read: int) -> None:
    torch.manual_seed(0)
    plain = _Model(sharing, False)
    model, x = copy.deepcopy(plain), torch.randn(4, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    for _ in range(2):
        for one in (plain, model):
            results = one(x)
            results[written].mul_(2)
            _weighted(results[read]).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]


def test_a_written_result_that_the_model_reads_is_refused() -> None:
    model, x = _Model("a row", True), torch.randn(4, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planner="keep-all")
    _, h, row = model(x)
    row.mul_(2)
    with pytest.raises(lowtide.ExecutionError, match="an output of the model was modified in place") as raised:
        _weighted(h).backward()
    frame = raised.traceback[-1].frame.f_locals
    assert "ModelCall" in repr(frame["self"])  # what a debugger or a log of the traceback prints


class _Views(nn.Module):
    """Returns views of its argument and of a buffer, and writes into views of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(10, 8))

    def forward(self, x: torch.Tensor) -> Tensors:
        self.table[2:] += 1
        self.table[1:][2:].mul_(2)
        parts = () if x.requires_grad else (torch.view_as_complex(x.view(10, 4, 2))[1:],)
        return torch.relu(self.layer(x)).square(), x[1:], x.t(), x.unfold(0, 3, 2), self.table[1:], *parts


@pytest.mark.parametrize("requires_grad", [False, True])
def test_views_of_what_lies_elsewhere_in_its_memory_than_the_sample_did(requires_grad: bool) -> None:
    """An argument that is a slice of a table, and a buffer that was replaced by one."""
    records = []
    for planned in (False, True):
        torch.manual_seed(0)
        model, table, record = _Views(), torch.randn(60, 8), list[torch.Tensor]()
        if planned:
            lowtide.rematerialize(model, (torch.randn(10, 8).requires_grad_(requires_grad),), budget="100%")
        for start in (0, 10, 3, 20):
            model.table = torch.ones(30, 8)[start // 2 :][:10]
            given = table.clone().requires_grad_(requires_grad)
            results = model(given[start : start + 10])
            sum(one.square().sum() * (2 + n) for n, one in enumerate(results) if one.requires_grad).backward()  # type: ignore[union-attr]
            record += [*results, model.table, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            record += [given.grad] if given.grad is not None else []
            model.zero_grad()
        records.append(record)
    assert len(records[0]) >= 32 and all(map(torch.equal, *records))
