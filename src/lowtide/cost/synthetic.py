"""Tensors to time operators on: any layout, values that are valid as indices, probabilities' signs and masks."""

from __future__ import annotations

import torch

from lowtide.cost.signature import ALIGNMENT_BYTES
from lowtide.program.layouts import span_elements
from lowtide.program.program import TensorMeta

_PATTERN_ELEMENTS = 1 << 16


def synthetic_tensor(meta: TensorMeta, *, whole: bool = False) -> torch.Tensor:
    """A tensor of this layout: integers 0, booleans true (what a mask selects takes the most memory then), floating values
    normal (a short pattern, repeated).

    The storage is only as large as the layout reaches, its offset only the original's alignment; ``whole``: both are the
    original's.
    """
    if whole:
        flat = torch.empty(meta.storage_bytes // meta.dtype.itemsize, dtype=meta.dtype, device=meta.device)
        _fill(flat)
        return flat.as_strided(meta.shape, meta.stride, meta.storage_offset)
    offset = meta.storage_offset * meta.dtype.itemsize % ALIGNMENT_BYTES // meta.dtype.itemsize
    flat = torch.empty(offset + span_elements(meta.shape, meta.stride), dtype=meta.dtype, device=meta.device)
    _fill(flat)
    return flat.as_strided(meta.shape, meta.stride, offset)


def _fill(flat: torch.Tensor) -> None:
    pattern = _pattern(flat.dtype, flat.device)
    if pattern is None:
        flat.zero_()
        return
    whole = flat.numel() // _PATTERN_ELEMENTS * _PATTERN_ELEMENTS
    flat[:whole].view(-1, _PATTERN_ELEMENTS).copy_(pattern)
    flat[whole:].copy_(pattern[: flat.numel() - whole])


def _pattern(dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    generator = torch.Generator(device="cpu").manual_seed(0)
    if dtype == torch.bool:
        return torch.ones(_PATTERN_ELEMENTS, dtype=torch.bool, device=device)
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(_PATTERN_ELEMENTS, dtype=drawn, generator=generator).to(device, dtype)
