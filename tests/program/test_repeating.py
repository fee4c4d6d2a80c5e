"""Which operators repeat their bits."""

from __future__ import annotations

import pytest
import torch

from lowtide.program.repeating import differs_in_bits, repeats_bits

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("operator", "differs"),
    [
        (aten.index_add.default, True),
        (aten.index_add_.default, True),
        (aten.scatter.src, True),
        (aten.scatter.value, False),
        (aten.cumsum.default, True),
        (aten.median.dim, True),
        (aten.upsample_bilinear2d_backward.default, True),
        (aten._scaled_dot_product_flash_attention_backward.default, True),
        (aten._scaled_dot_product_flash_attention.default, False),
        (aten.mm.default, False),
        (aten.embedding_dense_backward.default, False),
        (aten.index.Tensor, False),
        (torch.add, False),
    ],
)
def test_operators(operator: object, differs: bool) -> None:
    assert differs_in_bits(operator) is differs
    assert repeats_bits(operator, torch.device("cpu"))
