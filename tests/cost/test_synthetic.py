"""Synthetic arguments are such that operators take them, and that they take as long as real ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.signature import settings
from lowtide.cost.synthetic import make_valid

_ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("left", "right", "total"),
    [((64, 8), (4, 8, 6), 64), ((4, 5, 8), (8, 100), 100), ((8, 64), (64, 6), 64), ((10, 8), (4, 8, 6), 10)],
)
def test_groups_of_a_product_share_its_rows(left: tuple[int, ...], right: tuple[int, ...], total: int) -> None:
    """Of rows, of columns, and of the terms of sums."""
    ends = torch.zeros(4, dtype=torch.int32)
    make_valid("aten._grouped_mm.default", [torch.empty(left), torch.empty(right), ends])
    sizes = ends.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert sum(sizes) == total
    assert min(sizes) >= total // 4 // 16 * 16
    assert min(sizes) > 0


def test_probabilities_lie_between_0_and_1() -> None:
    args = [torch.empty(100), torch.randn(100)]
    make_valid("aten.bernoulli.Tensor", args)
    _ATEN.bernoulli.Tensor(*args)


@pytest.fixture
def _in_new_words() -> Iterator[None]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    assert torch.get_float32_matmul_precision() == "highest"


BEFORE = settings()


def test_precisions_that_are_set_in_the_new_words(_in_new_words: None) -> None:
    """PyTorch refuses to answer in the old ones then."""
    with pytest.raises(RuntimeError):
        torch.get_float32_matmul_precision()
    assert settings() != BEFORE
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))
    x = torch.randn(64, 16)
    lowtide.rematerialize(model, (x,), budget="100%", planning="wait")
    model(x).sum().backward()
