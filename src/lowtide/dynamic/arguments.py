"""Recorded arguments: what stands in the place of tensors, and walks through the lists and tuples that they are in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from lowtide.dynamic.node import Node


class View:
    """A tensor by what it is a view of: which bytes of which storage, and how they are read."""

    __slots__ = ("conjugate", "dtype", "negative", "node", "offset", "size", "stride")

    def __init__(self, node: Node, tensor: Tensor) -> None:
        self.node = node
        self.dtype = tensor.dtype
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conjugate = tensor.is_conj()
        self.negative = tensor.is_neg()

    def of(self, storage: UntypedStorage) -> Tensor:
        """The same view of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negative else tensor


def blank(tensor: Tensor) -> Tensor:
    """A tensor without memory of the same shape, strides and type."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with lists in place of lists and tuples, and ``function`` of everything else."""
    if isinstance(value, (list, tuple)):
        return [mapped(function, item) for item in value]
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """What is in lists and tuples, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def tensors_of(value: Any) -> Sequence[Tensor]:
    """The tensors in lists and tuples."""
    if isinstance(value, Tensor):
        return (value,)
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def views_in(args: Sequence[Any], kwargs: dict[str, Any]) -> list[View]:
    """The views among recorded arguments."""
    return [leaf for leaf in leaves([*args, *kwargs.values()]) if isinstance(leaf, View)]
