"""What ``test_experts`` runs under torchrun: a mixture of experts, two on each rank: ``... moe_program SCENARIO...``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.program.distributed.collectives import collectives_begun
from tests.integrations.launch import say
from tests.integrations.scenarios import perform

_EXPERTS, _WIDTH, _ROWS, _LENGTH = 4, 32, 8, 32
Sizes = Sequence[int] | None
Exchange = Callable[..., Tensor]


class _Exchanged(torch.autograd.Function):
    """As libraries write it: the collective of torch.distributed, the other way in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: Sizes, sent: Sizes) -> Tensor:
        ctx.sizes = received, sent
        return _exchanged(x, received, sent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        received, sent = ctx.sizes
        return _exchanged(gradient, sent, received), None, None


def _exchanged(x: Tensor, received: Sizes, sent: Sizes) -> Tensor:
    out = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent)
    return out


def by_function(x: Tensor, received: Sizes = None, sent: Sizes = None) -> Tensor:
    found: Tensor = _Exchanged.apply(x, received, sent)  # type: ignore[no-untyped-call]
    return found


def by_functional(x: Tensor, received: Sizes = None, sent: Sizes = None) -> Tensor:
    return functional.all_to_all_single_autograd(x, received, sent, dist.group.WORLD)


def by_nn(x: Tensor, received: Sizes = None, sent: Sizes = None) -> Tensor:
    from torch.distributed.nn.functional import all_to_all_single

    out = x.new_empty(len(x) if received is None else sum(received), *x.shape[1:])
    found: Tensor = all_to_all_single(out, x.contiguous(), received, sent)  # type: ignore[no-untyped-call]
    return found


class Experts(nn.Module):
    """Tokens go to the expert of the highest noisy score, wherever it is, and come back. ``capacity``: so many to an expert of
    each rank, more are left out; ``None``: as many as there are, so sizes depend on data."""

    def __init__(self, exchange: Exchange, capacity: int | None) -> None:
        super().__init__()
        self.exchange, self.capacity = exchange, capacity
        self.ranks, self.own = dist.get_world_size(), _EXPERTS // dist.get_world_size()
        self.router = nn.Linear(_WIDTH, _EXPERTS)
        self.up = nn.Parameter(torch.randn(self.own, _WIDTH, 4 * _WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(self.own, 4 * _WIDTH, _WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, _WIDTH)
        scores = self.router(tokens)
        weight, expert = torch.softmax(scores + 0.1 * torch.rand_like(scores), -1).max(-1)
        found = self._all(tokens, expert) if self.capacity is None else self._fitting(tokens, expert, self.capacity)
        return (found * weight[:, None]).reshape(x.shape)

    def _fitting(self, tokens: Tensor, expert: Tensor, capacity: int) -> Tensor:
        place = (F.one_hot(expert, _EXPERTS).cumsum(0) - 1).gather(1, expert[:, None])[:, 0]
        slot = torch.where(place < capacity, expert * capacity + place, _EXPERTS * capacity)
        given = tokens.new_zeros(_EXPERTS * capacity + 1, _WIDTH).index_add(0, slot, tokens)[:-1]
        got = self.exchange(given).reshape(self.ranks, self.own, capacity, _WIDTH).transpose(0, 1)
        made = F.gelu(got.reshape(self.own, -1, _WIDTH) @ self.up) @ self.down
        back = self.exchange(made.reshape(self.own, self.ranks, capacity, _WIDTH).transpose(0, 1).reshape(-1, _WIDTH))
        return torch.cat([back, back.new_zeros(1, _WIDTH)])[slot]

    def _all(self, tokens: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        sent = torch.bincount(expert, minlength=_EXPERTS).reshape(self.ranks, self.own)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sizes = received.sum(1).tolist(), sent.sum(1).tolist()
        got = self.exchange(tokens[order], *sizes)
        mine = torch.arange(self.own).repeat(self.ranks).repeat_interleave(received.reshape(-1))
        made = torch.zeros_like(got)
        for index in range(self.own):
            rows = (mine == index).nonzero()[:, 0]
            made = made.index_add(0, rows, F.gelu(got[rows] @ self.up[index]) @ self.down[index])
        back = self.exchange(made, *reversed(sizes))
        return torch.zeros_like(back).index_copy(0, order, back)


class Block(nn.Module):
    def __init__(self, exchange: Exchange, capacity: int | None) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.LayerNorm(_WIDTH),
            nn.Linear(_WIDTH, 8 * _WIDTH),
            nn.GELU(),
            nn.Linear(8 * _WIDTH, _WIDTH),
            nn.Dropout(0.1),
        )
        self.experts = Experts(exchange, capacity)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        return x + self.experts(x)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, exchange: Exchange, capacity: int | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(exchange, capacity) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@dataclass(slots=True)
class Run:
    """``collectives``: how many each step began."""

    model: nn.Module
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    collectives: list[float] = field(default_factory=list)


def trained(exchange: Exchange, capacity: int | None, budget: int | None = None, **options: Any) -> Run:
    torch.manual_seed(dist.get_rank())
    run = Run(Model(exchange, capacity))
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2)
    data = torch.randn(4, _ROWS, _LENGTH, _WIDTH)
    if budget is not None:
        lowtide.rematerialize(run.model, (data[0],), budget=budget, planner="auto{effort=1}", **options)
    torch.manual_seed(7 + dist.get_rank())
    for x in data:

        def compute(x: Tensor = x) -> None:
            loss = run.model(x)
            loss.backward()
            run.losses.append(loss.item())

        begun = collectives_begun()
        run.peaks.append(lowtide.measure(compute).peak_bytes)
        run.collectives.append(collectives_begun() - begun)
        optimizer.step()
        optimizer.zero_grad()
    return run


def assert_same(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses, (ours.losses, reference.losses)
    pairs = zip(ours.model.parameters(), reference.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert ours.collectives == reference.collectives, (ours.collectives, reference.collectives)


def fixed_capacity() -> None:
    """One program, in which an exchange runs once, whoever writes it."""
    for exchange in (by_function, by_functional, by_nn):
        reference = trained(exchange, 128)
        ours = trained(exchange, 128, int(0.6 * max(reference.peaks)))
        assert_same(ours, reference)
        (plan,) = lowtide.plans(ours.model)
        assert plan.overhead > 0
        assert max(ours.peaks) <= plan.budget_bytes
        say(f"{exchange.__name__}: {ours.peaks}, predicted {plan.peak_bytes}, alone {reference.peaks}")


def dropless() -> None:
    """Sizes depend on data: what does not communicate is planned, the rest runs as it is, and never again."""
    for exchange in (by_function, by_functional):
        reference = trained(exchange, None)
        ours = trained(exchange, None, int(0.75 * max(reference.peaks)))
        assert_same(ours, reference)
        assert len(lowtide.plans(ours.model)) >= 3
        assert max(ours.peaks[2:]) < max(reference.peaks)
        say(f"{exchange.__name__}: {ours.peaks}, alone {reference.peaks}")


def dropless_within_little() -> None:
    """Less than what runs as it is takes is an error, on each rank that it is too little for; no module that communicates runs
    again instead. ``lowtide.online`` evicts nothing that a collective was given."""
    reference = trained(by_function, None)
    online = trained(by_function, None, int(0.9 * max(reference.peaks)), on_capture_error="online")
    lowtide.restore(online.model)
    assert online.losses == reference.losses
    assert online.collectives == reference.collectives
    try:
        trained(by_function, None, int(0.3 * max(reference.peaks)))
    except lowtide.InfeasibleBudgetError as error:
        assert "for code between them" in str(error)
    else:
        raise AssertionError("a budget that cannot be met was")


if __name__ == "__main__":
    perform(fixed_capacity, dropless, dropless_within_little)
