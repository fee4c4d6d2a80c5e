"""Hooks of submodules that collect what these return in a context variable or in storage of the thread, as transformers' do."""

from __future__ import annotations

import contextvars
import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide

WIDTH, EXPERTS = 32, 4
_VARIABLE: contextvars.ContextVar[list[torch.Tensor] | None] = contextvars.ContextVar("collected", default=None)
_OF_THREAD = threading.local()


def _into_variable(module: nn.Module, arguments: Any, result: torch.Tensor) -> None:
    collected = _VARIABLE.get()
    if collected is not None:
        collected.append(result)


def _into_storage(module: nn.Module, arguments: Any, result: torch.Tensor) -> None:
    _OF_THREAD.collected.append(result)


class _Layer(nn.Module):
    """Hands rows to experts by the data, so that it is no program."""

    def __init__(self, hook: Callable[..., None]) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.gate.register_forward_hook(hook)
        self.mixed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixed(x)
        scores, found = self.gate(x), torch.zeros_like(x)
        chosen = scores.argmax(-1)
        for expert in range(EXPERTS):
            rows = torch.where(chosen == expert)[0]
            found.index_add_(0, rows, F.linear(x[rows], self.experts[expert]))
        return x + found


class _Collecting(nn.Module):
    def __init__(self, hook: Callable[..., None]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(hook) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _OF_THREAD.collected = collected = list[torch.Tensor]()
        token = _VARIABLE.set(collected)
        try:
            for layer in self.layers:
                x = layer(x)
        finally:
            _VARIABLE.reset(token)
        assert len(collected) == len(self.layers)
        return x.square().mean() + torch.stack(collected).logsumexp(-1).mean()


@pytest.mark.parametrize("hook", [_into_variable, _into_storage])
def test_tensors_of_captures_stay_out_of_what_hooks_collect(hook: Callable[..., None]) -> None:
    model = _Collecting(hook)
    plain, x = copy.deepcopy(model), torch.randn(256, WIDTH)
    lowtide.rematerialize(model, (x,), budget="90%")
    for _ in range(4):
        for one in (plain, model):
            one.zero_grad()
        losses = [one(x) for one in (plain, model)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
