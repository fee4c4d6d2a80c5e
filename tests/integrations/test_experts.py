"""Mixtures of experts, whose ranks exchange tokens (all-to-all): recomputation exchanges nothing again, routes none anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import all_to_all_single

import lowtide
from tests.integrations.launch import torchrun

_PROGRAM = "tests.integrations.moe_program"


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fixed_capacity", "dropless", "dropless_within_little"])
def test_scenario(scenario: str) -> None:
    assert torchrun(_PROGRAM, scenario).count("passed") == 2


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Exchanging(nn.Module):
    """``exchange`` writes into its first argument what it makes of the second."""

    def __init__(self, exchange: Callable[..., Any]) -> None:
        super().__init__()
        self.exchange, self.linear = exchange, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = torch.tanh(self.linear(x))
        got = torch.empty_like(given)
        self.exchange(got, given.detach())
        return (given * got).sum()


_IN_PLACE = {
    "all_to_all": lambda out, x: dist.all_to_all_single(out, x),
    "by_name": lambda out, x: all_to_all_single(out, x),
    "all_gather": lambda out, x: dist.all_gather_into_tensor(out, x),
    "list": lambda out, x: dist.all_gather([out], x),
    "reduce_scatter": lambda out, x: dist.reduce_scatter_tensor(out, x),
    "all_reduce": lambda out, x: dist.all_reduce(out.copy_(x)),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", _IN_PLACE)
def test_collectives_that_write_into_tensors(name: str) -> None:
    torch.manual_seed(0)
    model, x = _Exchanging(_IN_PLACE[name]), torch.randn(64, 16)
    reference = model(x)
    reference.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    lowtide.rematerialize(model, (x,), budget="100%", on_capture_error="error")
    loss = model(x)
    loss.backward()
    assert torch.equal(loss, reference)
    assert all(torch.equal(p.grad, known) for p, known in zip(model.parameters(), expected, strict=True))
    (plan,) = lowtide.plans(model)
    assert any(op.collective for op in plan.graph.ops)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("exchange", "words"),
    [
        (lambda out, x: dist.all_to_all_single(out, x, async_op=True).wait(), "awaited elsewhere"),
        (lambda out, x: dist.broadcast(out.copy_(x), 0), "known to no program"),
    ],
)
def test_what_a_program_cannot_follow(exchange: Callable[..., Any], words: str) -> None:
    with pytest.raises(lowtide.CaptureError, match=words):
        lowtide.rematerialize(_Exchanging(exchange), (torch.randn(64, 16),), budget="100%", on_capture_error="error")


@pytest.mark.usefixtures("one_rank")
def test_online_evicts_nothing_that_a_collective_was_given() -> None:
    """What it wrote cannot be had again by making an empty tensor."""
    x = torch.randn(4096)
    with lowtide.online(160_000):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        others = [torch.tanh(x * number) for number in range(20)]
        assert torch.equal(out, x)
        assert sum(map(torch.count_nonzero, others)) > 0
