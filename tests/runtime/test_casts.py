"""Parts under autocast, which casts a parameter once for all that use it, and sums what comes back in the low precision."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import lowtide
from tests.support.beside import plain_and_planned

WIDTH = 16


class _Wide(nn.Module):
    """Reads a weight that others may read, too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.norm = weight, nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(F.gelu(x @ self.weight) @ self.weight.t())


class _Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class _InParts(nn.Module):
    """``count`` calls in a row of ``parts``, between which it decides by its data."""

    def __init__(self, parts: list[nn.Module], count: int) -> None:
        super().__init__()
        self.parts, self.count = nn.ModuleList(parts), count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(self.count):
            x = x + self.parts[number % len(self.parts)](x)
            if x.sum() < -1e30:
                break
        return x.float().square().mean()


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 4)


def _of_one_weight() -> nn.Module:
    weight = _weight()
    return _InParts([_Wide(weight), _Wide(weight), _Wide(_weight())], 3)


def _around_one_module() -> nn.Module:
    inner = _Wide(_weight())
    return _InParts([_Holder(inner), _Holder(inner), _Wide(_weight())], 3)


def _repeated() -> nn.Module:
    return _InParts([_Holder(_Wide(_weight())), _Holder(_Wide(_weight()))], 4)


def _step(model: nn.Module, seed: int, keeps: bool) -> list[torch.Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=keeps):
        loss = model(x)
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    ("make", "first", "planned"), [(_of_one_weight, 0, 1), (_around_one_module, 0, 1), (_repeated, 1, 0)]
)
def test_casts_that_parts_have_in_common(make: Callable[[], nn.Module], first: int, planned: int) -> None:
    """That a part runs several times is seen in the first step."""
    plain, model = plain_and_planned(make)
    for seed in range(4):
        pairs = zip(_step(plain, seed, True), _step(model, seed, True), strict=True)
        assert seed < first or all(torch.equal(*pair) for pair in pairs), seed
    assert len(lowtide.plans(model)) >= planned


@pytest.mark.parametrize("make", [_of_one_weight, _around_one_module, _repeated])
def test_casts_that_are_not_kept(make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    plain, model = plain_and_planned(make)
    with caplog.at_level(logging.WARNING, logger="lowtide.runtime.parts.casts"):
        for seed in range(3):
            pairs = zip(_step(plain, seed, False), _step(model, seed, False), strict=True)
            assert all(torch.equal(*pair) for pair in pairs)
    assert len(lowtide.plans(model)) >= 2
    assert not [one for one in caplog.records if one.name == "lowtide.runtime.parts.casts"]
