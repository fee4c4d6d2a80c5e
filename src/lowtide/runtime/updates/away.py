"""Tensors that stand for others in a second memory."""

from __future__ import annotations

from typing import Any, Self

import torch


class AwayTensor(torch.Tensor):
    """Has the form of a tensor, and knows the ``place`` where its elements lie. Detached, it is at the same place."""

    place: Any
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, place: Any) -> Self:
        kind: dict[str, Any] = {"strides": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device}
        made: Self = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, **kind)
        made.place = place
        return made
