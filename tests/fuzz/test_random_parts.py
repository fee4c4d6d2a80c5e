"""Random modules as parts of one that decides by its data, or planned by themselves inside of another, are equal to eager to
the bit: what they read is read elsewhere, too.

``LOWTIDE_FUZZ_SEEDS=5000`` makes the wide sweep wider.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import NoGradientError
from tests.fuzz.losses import Outcome, compare, difference, train
from tests.fuzz.modules import WIDTH, Description, build, describe

_QUICK = 4
_BLOCK = 50
_SEEDS = int(os.environ.get("LOWTIDE_FUZZ_SEEDS", "1000"))


class Around(nn.Module):
    def __init__(self, description: Description) -> None:
        super().__init__()
        self.inner = build(description)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=description.dtype))

    def forward(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        before = x * self.scale
        first = before.sin().sum()
        return self.inner(ids, before, y), first + (before.cos() * self.scale).sum()


class Deciding(Around):
    def forward(self, ids: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> Any:
        result, rest = super().forward(ids, x, y)
        return rest if rest > 1e30 else (result, rest)


def _found(seed: int) -> str:
    found = compare(describe(seed), Deciding)
    return f"seed {seed}: {found.why}" if found.outcome not in (Outcome.EQUAL, Outcome.INVALID) else ""


@pytest.mark.parametrize("seed", [*range(_QUICK), 7])  # 7 draws with less to spare than a generator's state takes
def test_a_random_module_as_a_part(seed: int) -> None:
    why = _found(seed)
    assert not why, why


def _found_inside(seed: int) -> str:
    """With a plan for the inner module alone, which keeps all: it is the order of the gradients that is looked at."""
    description = describe(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = train(Around(description), description)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError, ZeroDivisionError):
            return ""  # it does not run
        model = Around(description)
        lowtide.rematerialize(model.inner, budget="100%", planner="greedy")
        try:
            why = difference(train(model, description), expected)
        except (NoGradientError, lowtide.PlanError):  # none arrives, or nothing takes memory
            return ""
    return f"seed {seed}: {why}" if why else ""


@pytest.mark.parametrize("seed", [*range(_QUICK // 2), 54, 243])  # 54 reads the argument several times, 243 a copy
def test_a_random_module_inside_of_another(seed: int) -> None:
    why = _found_inside(seed)
    assert not why, why


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("found", [_found, _found_inside])
@pytest.mark.parametrize("first", range(_QUICK, _SEEDS, _BLOCK))
def test_random_modules_as_parts(first: int, found: Callable[[int], str]) -> None:
    failed = [why for seed in range(first, min(first + _BLOCK, _SEEDS)) if (why := found(seed))]
    assert not failed, "\n".join(failed)
