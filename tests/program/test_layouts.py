"""Predicates on shapes and strides, against what PyTorch says of real tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

import lowtide
from lowtide.program import layouts


def _tensors() -> list[torch.Tensor]:
    found = []
    for shape in ((), (1,), (4,), (3, 1, 2), (2, 3, 4), (1, 2, 1, 3), (0, 3), (2, 0, 1)):
        new = torch.empty(shape)
        found += [new.permute(order) for order in itertools.permutations(range(len(shape)))]
        found += [new[..., ::2], new[..., :1], new[..., 1:]] if shape else []
        found += [new.expand(2, *shape), new.unsqueeze(-1).expand(*shape, 3)]
    return found


@pytest.mark.parametrize("tensor", _tensors(), ids=lambda t: f"{list(t.shape)}{list(t.stride())}")
def test_predicates_agree_with_torch(tensor: torch.Tensor) -> None:
    shape, strides = tensor.shape, tensor.stride()
    places = torch.arange(1000).as_strided(shape, strides).flatten().tolist()
    contiguous = layouts.contiguous_strides(shape)
    assert contiguous == torch.empty(shape).stride()
    assert layouts.is_equivalent(shape, strides, contiguous) == tensor.is_contiguous()
    assert layouts.distinct_elements(shape, strides) == len(set(places))
    assert layouts.is_expanded(shape, strides) == (len(set(places)) < len(places))
    assert layouts.span_elements(shape, strides) == (max(places) + 1 if places else 0)
    if places:
        assert layouts.is_dense(shape, strides) == (sorted(places) == list(range(len(places))))
    if layouts.is_dense(shape, strides):
        ordered = tensor.permute(layouts.memory_order(shape, strides))
        assert ordered.is_contiguous()


def test_strides_of_dimensions_of_size_1_do_not_matter() -> None:
    assert layouts.is_equivalent((2, 1, 3), (3, 3, 1), (3, 7, 1))
    assert not layouts.is_equivalent((2, 2, 3), (6, 3, 1), (3, 6, 1))
    assert layouts.is_equivalent((2, 0), (1, 1), (5, 7))


def test_a_tensor_without_memory() -> None:
    like = torch.randn(400, 6, requires_grad=True)[3:, ::2]
    made: list[torch.Tensor] = []
    assert lowtide.measure(lambda: made.append(layouts.without_memory(like))).peak_bytes == 0
    (hollow,) = made
    assert (hollow.shape, hollow.stride(), hollow.requires_grad) == (like.shape, like.stride(), True)
    assert (hollow.storage_offset(), hollow.untyped_storage().nbytes()) == (18, 400 * 6 * 4)
    empty = layouts.hollow(like.shape, like.stride(), like.dtype, like.device)
    assert layouts.without_memory(empty).stride() == like.stride()
