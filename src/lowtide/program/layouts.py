"""How tensors lie in memory: predicates on shapes and strides, both counted in elements as PyTorch counts them.

No element is found by the stride of a dimension of size 1, and a tensor without elements lies nowhere; PyTorch reports some
stride all the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

# Functionalized writes into views: they copy the whole storage behind the view, not just the part that it shows.
_COPIES_STORAGE = {
    "aten.copy.default",
    "aten.slice_scatter.default",
    "aten.select_scatter.default",
    "aten.diagonal_scatter.default",
    "aten.as_strided_scatter.default",
}


def copies_storage(target: Callable[..., Any]) -> bool:
    """Whether what the operator allocates depends on the storages behind its arguments."""
    return isinstance(target, torch._ops.OpOverload) and str(target) in _COPIES_STORAGE


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    step, strides = 1, []
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_equivalent(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the strides ``one`` and ``other`` address the same elements for this shape."""
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, one, other, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements are non-overlapping and dense, with the dimensions in any order."""
    expected = 1
    for step, size in sorted((step, size) for step, size in zip(strides, shape, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def is_expanded(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several elements along a dimension share one place in memory (an expanded dimension)."""
    return distinct_elements(shape, strides) != math.prod(shape)


def distinct_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements in memory, counting an expanded dimension once."""
    return math.prod(size if step or not size else 1 for size, step in zip(shape, strides, strict=True))


def span_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from the first in memory through the last; 0 for a tensor without elements."""
    reach = sum((size - 1) * abs(step) for size, step in zip(shape, strides, strict=True))
    return 0 if 0 in shape else 1 + reach


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the dimensions in memory order, largest stride first."""
    return sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim]))


def stretch_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat view of all memory from the tensor's first element to its last."""
    return tensor.as_strided((span_elements(tensor.shape, tensor.stride()),), (1,))


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor in the same layout, expanded dimensions included."""
    return stretch_of(tensor.detach()).clone().as_strided(tensor.shape, tensor.stride(), 0)


def empty(meta: Any) -> torch.Tensor:
    """A new tensor in the layout of ``meta``: a ``TensorMeta``, or whatever else has its shape, stride, dtype and device."""
    return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the layout of ``tensor`` that has no memory behind it: only its layout, its type and the size of its storage,
    which is as large, may be read. No memory is taken to make it."""
    shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes < (offset + span_elements(shape, stride)) * tensor.itemsize:  # it has none itself
        return hollow(shape, stride, tensor.dtype, tensor.device).requires_grad_(tensor.requires_grad)
    storage = torch._C._construct_storage_from_data_pointer(0, tensor.device, nbytes)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(storage, offset, shape, stride).requires_grad_(tensor.requires_grad)


def hollow(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor in the given layout, whose storage is empty."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


def memory_of(tensor: torch.Tensor) -> int:
    """Return a key that is equal for tensors sharing their memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or made of other tensors
        return id(tensor)


def dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the strided parts of a tensor: itself, or the indices and values of a sparse COO tensor."""
    return (tensor._indices(), tensor._values()) if tensor.layout is torch.sparse_coo else (tensor,)
