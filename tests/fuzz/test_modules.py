"""Random modules with several results, views among them, are equal to eager to the bit at random budgets.

``LOWTIDE_FUZZ_SEEDS=5000`` makes the wide sweep wider.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
from torch import nn

from tests.fuzz.losses import (
    Found,
    Objective,
    Outcome,
    Term,
    backward,
    compare,
    difference,
    objectives,
    smallest,
    train,
)
from tests.fuzz.modules import build, describe

_QUICK = 6
_BLOCK = 50
_SEEDS = int(os.environ.get("LOWTIDE_FUZZ_SEEDS", "2000"))


@functools.cache
def _compared(seed: int) -> Found:
    return compare(describe(seed))


@pytest.mark.parametrize("seed", range(_QUICK))
def test_a_random_module(seed: int) -> None:
    found = _compared(seed)
    assert found.outcome in (Outcome.EQUAL, Outcome.INVALID), found.why


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(_QUICK, _SEEDS, _BLOCK))
def test_random_modules(first: int) -> None:
    found = {seed: compare(describe(seed)) for seed in range(first, min(first + _BLOCK, _SEEDS))}
    failed = [f"seed {seed}: {one.why}" for seed, one in found.items() if one.outcome is Outcome.DIFFERS]
    assert not failed, "\n".join(failed)


def test_a_seed_is_one_module() -> None:
    assert describe(3) == describe(3)
    assert objectives(3) == objectives(3)
    assert len({str(describe(seed).statements) for seed in range(20)}) == 20


def test_layers_without_a_weight_are_not_tied() -> None:
    description = describe(5765)
    assert description.ties == (("scale 4", "scale 4"),)
    assert compare(description).outcome is Outcome.EQUAL


def test_most_seeds_are_of_use() -> None:
    """They have results with a gradient, several of them, and views among them."""
    made = [describe(seed) for seed in range(60)]
    assert sum(len(one.results) > 2 for one in made) > 40
    kinds = {statement.kind for one in made for statement in one.statements}
    assert len(kinds) > 45


def test_a_difference_in_one_bit_is_seen() -> None:
    description = describe(next(seed for seed in range(40) if _compared(seed).outcome is Outcome.EQUAL))
    records = [train(build(description), description) for _ in range(2)]
    assert difference(*records) == ""
    name = next(
        name for name, value in records[0][2].items() if name.startswith("result") and value.is_floating_point()
    )
    value = records[0][2][name]
    records[0][2][name] = torch.nextafter(value, value + 1)
    assert difference(*records).startswith(f"step 2, {name}")


def test_a_failure_is_made_smaller() -> None:
    description = describe(12)
    kind = description.statements[-1].kind
    kept = smallest(description, lambda other: any(s.kind == kind for s in other.statements))
    assert len(kept.statements) <= len(description.statements) and len(kept.results) == 1
    assert any(statement.kind == kind for statement in kept.statements)


@pytest.mark.parametrize("mode", ["scalar", "given", "passes", "grad"])
def test_every_way_to_ask_for_gradients(mode: str) -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    backward(Objective(mode, (Term(0, "sum", 1.0), Term(1, "square", 0.5))), (model(x), x), list(model.parameters()))
    assert all(parameter.grad is not None for parameter in model.parameters())
