"""Tensors to time operators on: any layout, values that are valid as indices, probabilities' signs and masks."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from lowtide.cost.signature import ALIGNMENT_BYTES
from lowtide.program.layouts import span_elements
from lowtide.program.program import TensorMeta

_PATTERN_ELEMENTS = 1 << 16


def synthetic_tensor(meta: TensorMeta, *, whole: bool = False, drawn: bool = True) -> torch.Tensor:
    """A tensor of this layout: integers 0, booleans true (what a mask selects takes the most memory then), floating values
    normal (a short pattern, repeated), or ones where values do not matter and need not be ``drawn``. The storage is only as
    large as the layout reaches, its offset only the original's alignment; ``whole``: both are the original's."""
    if meta.entries is not None:
        return _sparse(meta, *meta.entries)
    itemsize, offset = meta.dtype.itemsize, meta.storage_offset
    size = meta.storage_bytes // itemsize
    if not whole:
        offset = offset * itemsize % ALIGNMENT_BYTES // itemsize
        size = offset + span_elements(meta.shape, meta.stride)
    flat = torch.empty(size, dtype=meta.dtype, device=meta.device)
    _fill(flat, drawn)
    return flat.as_strided(meta.shape, meta.stride, offset)


def _sparse(meta: TensorMeta, entries: int, coalesced: bool) -> torch.Tensor:
    """With so many entries, evenly spread."""
    elements = math.prod(meta.shape)
    places = torch.arange(entries, device=meta.device) * max(elements // max(entries, 1), 1)
    indices = torch.stack(torch.unravel_index(places % max(elements, 1), meta.shape))
    values = torch.ones(entries, dtype=meta.dtype, device=meta.device)
    return torch.sparse_coo_tensor(indices, values, meta.shape, is_coalesced=coalesced, check_invariants=False)


@functools.cache
def _pattern(dtype: torch.dtype) -> torch.Tensor:
    """In memory that is not the allocator's: it stays, and is no part of the pass that is being planned."""
    drawn = np.random.default_rng(0).standard_normal((_PATTERN_ELEMENTS, 2))
    pattern = torch.frombuffer(bytearray(_PATTERN_ELEMENTS * dtype.itemsize), dtype=dtype)
    return pattern.copy_(torch.from_numpy(drawn.view(complex)[:, 0] if dtype.is_complex else drawn[:, 0]))


def _fill(flat: torch.Tensor, drawn: bool) -> None:
    if not (flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.fill_(flat.dtype == torch.bool)
        return
    if not drawn:
        flat.fill_(1)
        return
    pattern = _pattern(flat.dtype).to(flat.device)
    whole = flat.numel() // _PATTERN_ELEMENTS * _PATTERN_ELEMENTS
    flat[:whole].view(-1, _PATTERN_ELEMENTS).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])
