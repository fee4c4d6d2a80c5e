"""Attention of a model without memory, as a GPU computes it.

On the meta device, ``scaled_dot_product_attention`` has no fused kernels and computes the scores of all pairs of
tokens. A GPU uses a fused kernel that never stores them: flash attention for half precision without a mask, otherwise
the memory-efficient kernel, if the head sizes allow it (PyTorch's ``sdp_utils.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256  # largest head size of flash attention
_ALIGNED = 8  # head sizes must be a multiple of this, in elements


class FusedAttention(TorchFunctionMode):
    """A context in which attention of meta tensors is a fused kernel if a GPU has one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.scaled_dot_product_attention and args[0].device.type == "meta":
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    same = query.shape[-1] == key.shape[-1] == value.shape[-1]
    fits = same and query.dim() == 4 and query.shape[-1] % _ALIGNED == 0
    if fits and attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _LARGEST_HEAD:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return result
    if fits and query.dtype in (*_HALF, torch.float32) and query.shape[1] == key.shape[1]:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        result = efficient(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        return result
    with torch._C.DisableTorchFunction():
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as numbers to add, expanded to all heads."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
