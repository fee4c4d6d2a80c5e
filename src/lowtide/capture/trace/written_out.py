"""Versions of functions that read sizes as numbers, for traces with symbolic sizes.

``len`` returns a Python number, and ``range`` takes Python numbers. The C++ code of some functions also takes the sizes
of its arguments as numbers and then calls operators. In a trace with symbolic sizes, this fixes the sizes to those of
the traced call (``interpolate``) or raises an error (an LSTM). So in such a trace, ``len`` returns a symbol, ``range``
asks only for its number of steps, and the functions here call the same operators. The caller compares a program for
many shapes with a capture made by PyTorch's own code.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import upsample_compute_output_size

from lowtide.capture.trace.patches import STANDS_FOR, InPlace, all_wrapped, replaced, wrapped
from lowtide.capture.trace.sizes import hints
from lowtide.objects.walk import parts_of

_RANGE = range
_LSTM = 2  # kind of recurrent layer in oneDNN's operator
_UPSAMPLING = {  # whether it takes align_corners
    "upsample_nearest1d": False, "upsample_nearest2d": False, "upsample_nearest3d": False,
    "_upsample_nearest_exact1d": False, "_upsample_nearest_exact2d": False, "_upsample_nearest_exact3d": False,
    "upsample_linear1d": True, "upsample_bilinear2d": True, "upsample_trilinear3d": True, "upsample_bicubic2d": True,
    "_upsample_bilinear2d_aa": True, "_upsample_bicubic2d_aa": True,
}  # fmt: skip


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """Inside, these functions accept symbolic sizes in this thread."""
    places = [(torch._C._nn, name) for name in _UPSAMPLING]
    functions = all_wrapped([*places, (torch._VF, "lstm")], _wrapped)
    with functions, wrapped(builtins, "len", _length), replaced(builtins, "range", _Range):
        yield


def _length(function: Callable[[Any], int]) -> Callable[[Any], Any]:
    def length(value: Any) -> Any:
        symbolic = isinstance(value, Tensor) and value._has_symbolic_sizes_strides and value.dim()
        return value.shape[0] if symbolic else function(value)

    return length


class _Counting(InPlace):
    """Metaclass of ``_Range``."""

    def __call__(cls, *args: Any) -> Any:
        return _counted(*args) if any(isinstance(one, torch.SymInt) for one in args) else _RANGE(*args)


class _Range(metaclass=_Counting):
    """Replaces ``range``."""

    original = _RANGE


setattr(_Range, STANDS_FOR, _RANGE)


def _counted(*args: Any) -> list[Any]:
    """The numbers of ``range(*args)``. The condition on the sizes is only how many numbers there are: rows in pieces of
    128 may be any number of rows that makes as many pieces."""
    start, stop, step = slice(*args).start or 0, slice(*args).stop, 1 if len(args) < 3 else args[2]
    count = len(_RANGE(*hints((start, stop, step))))
    last, end = start + (count - 1) * step, start + count * step
    up = step > 0
    if count:
        assert last < stop if up else last > stop
    assert end >= stop if up else end <= stop
    return [start + number * step for number in _RANGE(count)]


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__
    own = functools.partial(_upsampled, name) if name in _UPSAMPLING else _lstm

    def call(*args: Any, **kwargs: Any) -> Any:
        symbolic = any(isinstance(one, Tensor) and one._has_symbolic_sizes_strides for one in parts_of((args, kwargs)))
        return own(function, *args, **kwargs) if symbolic else function(*args, **kwargs)

    return call


def _upsampled(name: str, function: Any, x: Tensor, output_size: Any, *rest: Any) -> Tensor:
    """``rest``: whether corners are aligned, and either one sequence of factors or one factor per dimension."""
    aligned, factors = (rest[:1], rest[1:]) if _UPSAMPLING[name] else ((), rest)
    if len(factors) != 1 or not (factors[0] is None or isinstance(factors[0], Sequence)):
        found: Tensor = function(x, output_size, *rest)
        return found
    size = upsample_compute_output_size(x.shape, output_size, factors[0])  # type: ignore[no-untyped-call]
    each = factors[0] or [None] * len(size)
    found = getattr(torch.ops.aten, name).default(x, size, *aligned, *each)
    return found


def _lstm(function: Any, x: Tensor, *args: Any) -> Any:
    """An LSTM by oneDNN's operator, in the cases in which PyTorch uses it: on a CPU, with sequences that are not
    packed."""
    given = [one for one in parts_of((x, args)) if isinstance(one, Tensor)]
    if isinstance(args[0], Tensor) or not _by_onednn(given):
        return function(x, *args)
    (hidden, cells), weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
    if hidden.shape[2] != cells.shape[2]:  # has projections
        return function(x, *args)
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    directions, count = 2 if bidirectional else 1, 4 if has_biases else 2
    per_layer = [weights[first : first + count] for first in range(0, len(weights), count)]
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            before = hidden[number], cells[number]
            biases = [] if has_biases else [_zeros(weight) for weight in reversed(per_layer[number])][::-1]
            output, *after, _ = torch.ops.aten.mkldnn_rnn_layer.default(
                x, *per_layer[number], *biases, *before, direction > 0, [], _LSTM, hidden.shape[2], layers, has_biases,
                bidirectional, batch_first, train,
            )  # fmt: skip
            outputs.append(output)
            last.append(tuple(after))
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout != 0 and train and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    found = x.transpose(0, 1) if batch_first else x
    return found, *(torch.stack(list(ends)) for ends in zip(*last, strict=True))


def _zeros(like: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.zeros.default(like.shape, dtype=like.dtype, layout=like.layout, device=like.device)
    return found


def _by_onednn(tensors: Sequence[Tensor]) -> bool:
    return torch._C._get_mkldnn_enabled() and all(
        one.device.type == "cpu" and one.dtype is torch.float32 for one in tensors
    )
