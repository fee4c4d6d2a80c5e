"""Synthetic tensors to time operators on: any layout, with values that are valid as indices, probabilities, signs and
masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from lowtide.cost.signature import ALIGNMENT_BYTES
from lowtide.program.layouts import span_elements, stretch_of
from lowtide.program.program import TensorMeta

_PATTERN_ELEMENTS = 1 << 16


def synthetic_tensor(meta: TensorMeta, *, whole: bool = False, drawn: bool = True) -> torch.Tensor:
    """A tensor with this layout.

    Integers are 0, booleans true (masks then select most), and floating values normal (a short repeated pattern), or
    ones if not ``drawn``, when values do not matter. The storage is only as large as the layout needs, with the
    original offset's alignment; with ``whole``, size and offset are the original's.
    """
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
    """A sparse tensor with so many entries, evenly spread."""
    elements = math.prod(meta.shape)
    places = torch.arange(entries, device=meta.device) * max(elements // max(entries, 1), 1)
    indices = torch.stack(torch.unravel_index(places % max(elements, 1), meta.shape))
    values = torch.ones(entries, dtype=meta.dtype, device=meta.device)
    return torch.sparse_coo_tensor(indices, values, meta.shape, is_coalesced=coalesced, check_invariants=False)


@functools.cache
def _pattern(dtype: torch.dtype) -> torch.Tensor:
    """Random values, in memory outside the allocator: it stays allocated and is not part of the pass being planned."""
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


def make_valid(operator: str, args: Sequence[Any]) -> None:
    """Change those synthetic arguments that the operator would not accept."""
    positions, change = _VALID.get(operator, ((), None))
    given = [args[position] for position in positions]
    if change is not None and isinstance(given[0], torch.Tensor):
        change(*given)
    if operator in _PUTTING and isinstance(args[2], torch.Tensor):
        _select_as_many(args[1], args[2])


def _share_out(targets: torch.Tensor, lengths: torch.Tensor) -> None:
    """Make the lengths of concatenated targets add up to their total."""
    if targets.dim() == 1 and len(lengths) > 0:
        lengths.fill_(len(targets) // len(lengths))
        lengths[:1] += len(targets) % len(lengths)


def _share_rows(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor | None) -> None:
    """Give all groups of a grouped product equal parts of rows (or columns, or terms), in multiples of 16 if large
    enough."""
    if ends is not None and len(ends) > 0:
        total = left.shape[-1] if left.dim() == right.dim() else left.shape[0] if left.dim() == 2 else right.shape[-1]
        each = total // len(ends)
        ends.copy_(torch.arange(1, len(ends) + 1) * (each - each % 16 if each >= 16 else each))
        ends[-1:] = total


def _select_as_many(indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> None:
    """Make a single mask select as many elements as there are values."""
    before = next((place for place, one in enumerate(indices) if one is not None), len(indices))
    mask = indices[before] if len(indices) == before + 1 else None
    if mask is not None and mask.dtype == torch.bool and values.dim() > before and values.shape[before] > 1:
        mask.copy_((torch.arange(mask.numel(), device=mask.device) < values.shape[before]).view(mask.shape))


_PUTTING = ("aten.index_put.default", "aten.index_put_.default")
# Arguments, by position, that need other values: pivots and bags count from one, rates and deviations are positive,
# probabilities lie between 0 and 1, factored matrices are positive definite.
_VALID: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "aten.linalg_lu_solve.default": ((1,), lambda pivots: pivots.fill_(1)),
    "aten.lu_unpack.default": ((1,), lambda pivots: pivots.fill_(1)),
    "aten._embedding_bag_backward.default": ((4,), lambda sizes: sizes.fill_(1)),
    "aten.multinomial.default": ((0,), lambda weights: weights.abs_()),
    "aten.poisson.default": ((0,), lambda rates: rates.abs_()),
    "aten.bernoulli.default": ((0,), lambda probabilities: probabilities.sigmoid_()),
    "aten.bernoulli.Tensor": ((1,), lambda probabilities: probabilities.sigmoid_()),
    "aten._grouped_mm.default": ((0, 1, 2), _share_rows),
    "aten.binary_cross_entropy.default": (
        (0, 1),
        lambda *probabilities: [stretch_of(one).sigmoid_() for one in probabilities],
    ),
    "aten.normal.Tensor_Tensor": ((1,), lambda deviations: deviations.abs_()),
    "aten.normal.float_Tensor": ((1,), lambda deviations: deviations.abs_()),
    "aten.cholesky.default": ((0,), lambda matrices: matrices.zero_().diagonal(dim1=-2, dim2=-1).fill_(1)),
    "aten.multilabel_margin_loss_backward.default": ((4,), lambda is_target: is_target.zero_()),
    "aten._ctc_loss.Tensor": ((1, 3), _share_out),
}
