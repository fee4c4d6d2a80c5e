"""Modules that are no programs, run again in the backward pass: ``runtime.recomputed``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lowtide
from lowtide.runtime.recomputed import recomputed


class _Ragged(nn.Module):
    """Attention within rows of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in self.projections]
        return nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(-2)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_tensors() -> None:
    torch.manual_seed(0)
    model = _Ragged()
    plain = copy.deepcopy(model)
    rows = torch.nested.nested_tensor([torch.randn(length, 16) for length in (3, 5, 2)], layout=torch.jagged)
    ran: list[bool] = []
    found = recomputed(model, model.forward, (rows,), {}, lambda: ran.append(True))
    expected = plain(rows)
    assert torch.equal(found.values(), expected.values())
    for result in (found, expected):
        torch.nested.to_padded_tensor(result, 0.0).square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert ran and all(torch.equal(own.grad, other.grad) for own, other in pairs)


class _Masks(nn.Module):
    """Reads a table that is large beside what it computes, and writes into another one at times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(4096, 16))
        self.register_buffer("sums", torch.zeros(2048, 16))

    def forward(self, x: torch.Tensor, writes: bool) -> torch.Tensor:
        hidden = self.layer(x) * self.table[: x.shape[0]] + self.sums[0]
        if writes:
            self.sums[:4].add_(hidden.detach())
        return torch.tanh(hidden * self.sums[1])


@pytest.mark.parametrize("writes", [True, False])
def test_large_buffers_are_copied_where_they_are_written_into(writes: bool) -> None:
    torch.manual_seed(0)
    model, x = _Masks(), torch.randn(4, 16)
    model.sums += 1
    plain = copy.deepcopy(model)
    expected, found = plain(x, writes), None

    def run() -> None:
        nonlocal found
        found = recomputed(model, model.forward, (x, writes), {}, lambda: None)

    peak = lowtide.measure(run).peak_bytes
    assert (peak > model.table.nbytes / 2) == writes and peak < model.table.nbytes
    for result in (found, expected):
        assert result is not None
        result.square().sum().backward()
    assert all(
        torch.equal(own.grad, other.grad) for own, other in zip(model.parameters(), plain.parameters(), strict=True)
    )
    assert torch.equal(model.sums, plain.sums)


def test_many_running_statistics() -> None:
    """Of which the operator that writes them does not say so."""
    model = nn.BatchNorm1d(1 << 15)
    plain, x = copy.deepcopy(model), torch.randn(3, 1 << 15)
    recomputed(model, model.forward, (x,), {}, lambda: None).square().sum().backward()
    plain(x).square().sum().backward()
    assert all(torch.equal(own, other) for own, other in zip(model.buffers(), plain.buffers(), strict=True))


def test_a_large_buffer_that_is_written_into_before_the_backward_pass() -> None:
    model = _Masks()
    result = recomputed(model, model.forward, (torch.randn(4, 16), False), {}, lambda: None)
    model.table.zero_()
    with pytest.raises(lowtide.ExecutionError, match="buffer table of a _Masks was modified"):
        result.sum().backward()
