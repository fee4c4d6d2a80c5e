"""Packed sequences as operators of a program.

PyTorch packs, pads and runs recurrent layers over packed sequences in functions that read the lengths from memory, and
fake tensors have no memory. The functions of this module replace them while a model is traced. They read the lengths as
Python code does, so other lengths need another program. Rows are chosen and placed by one operator each, in the layouts
that eager gives them. A layer is one operator (``program.recurrent``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from lowtide.capture.trace.known_values import read_values
from lowtide.errors import CaptureError
from lowtide.program.recurrent import BACKWARD, KINDS, Recurrent


def _recurrent(kind: str) -> Callable[..., Any]:
    """The replacement for PyTorch's function for one kind of recurrent layer, which takes padded or packed
    sequences."""

    def run(
        data: Tensor, batch_sizes: Any, hx: Any, params: Any, biases: Any = None, layers: Any = None, dropout: Any = 0.0,
        training: bool = False, bidirectional: bool = False,
    ) -> Any:  # fmt: skip
        padded = not isinstance(params, (tuple, list))
        if padded or data.device.type != "cpu" or torch.is_autocast_enabled("cpu") or not data.is_contiguous():
            return NotImplemented
        first = [one.unbind(0) for one in (hx if isinstance(hx, (tuple, list)) else (hx,))]
        sizes, each = _integers(batch_sizes), len(params) // len(first[0])
        if sizes is None:
            return NotImplemented
        if sizes[0] == sizes[-1]:  # eager runs these as padded ones too
            full, options = (
                data.view(len(sizes), sizes[0], -1),
                (params, biases, layers, dropout, training, bidirectional),
            )
            result, *last = getattr(torch, kind)(full, hx, *options, False)
            return result.reshape(len(data), -1), *last
        if each % 2:  # has a projection
            return NotImplemented
        return _stacked(kind, data, sizes, first, params, layers, dropout if training else 0, bidirectional)

    return run


def _stacked(
    kind: str, data: Tensor, sizes: list[int], first: Sequence[Sequence[Tensor]], params: Sequence[Tensor], layers: int,
    dropout: float, bidirectional: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Recurrent layers on top of each other, each in one direction or two."""
    each, last = len(params) // len(first[0]), list[Any]()
    for layer in range(layers):
        results: list[Any] = []
        for reverse in (False, True)[: 1 + bidirectional]:
            number = len(last) + len(results)
            hidden, weights = [one[number] for one in first], params[each * number : each * (number + 1)]
            results.append(Recurrent.apply(kind, sizes, reverse, len(hidden), data, *hidden, *weights))  # type: ignore[no-untyped-call]
        data = torch.cat([result[0] for result in results], -1) if bidirectional else results[0][0]
        last += [result[1:] for result in results]
        if dropout and layer < layers - 1:
            data = torch.dropout(data, dropout, True)
    return data, *(torch.stack(one, 0) for one in zip(*last, strict=True))


def _pack(padded: Tensor, lengths: Any, batch_first: bool = False) -> Any:
    known = _integers(lengths)
    rows = padded.transpose(0, 1) if batch_first else padded
    valid = known and known == sorted(known, reverse=True) and known[-1] > 0 and known[0] <= rows.shape[0]
    if not known or not valid or len(known) != rows.shape[1]:
        return NotImplemented
    sizes = [sum(length > step for length in known) for step in range(known[0])]
    return rows[_places(sizes, padded.device)].contiguous(), torch.tensor(sizes)


def _pad(data: Tensor, batch_sizes: Any, batch_first: bool, value: float, total_length: int = -1) -> Any:
    sizes = _integers(batch_sizes)
    if not sizes or 0 <= total_length < len(sizes):
        return NotImplemented
    shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
    padded = data.new_full(shape, value).index_put(_places(sizes, data.device), data)
    lengths = torch.tensor([sum(size > number for size in sizes) for number in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _places(sizes: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The step and the sequence of each row of packed data."""
    steps = [step for step, size in enumerate(sizes) for _ in range(size)]
    sequences = [number for size in sizes for number in range(size)]
    return torch.tensor(steps, device=device), torch.tensor(sequences, device=device)


def _integers(tensor: Any) -> list[int] | None:
    """The numbers as Python code reads them; ``None`` if they are not known."""
    real = read_values(tensor)
    return None if real is None else real.tolist()


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch, kind): _recurrent(kind) for kind in KINDS},
    torch._VF._pack_padded_sequence: _pack,
    torch._VF._pad_packed_sequence: _pad,
}
_BUILTIN = type(torch.relu)
_ADD = torch.ops.aten.add.Tensor


def of_packed(function: Any) -> Callable[..., Any]:
    """What to call in place of a function of PyTorch's: its replacement, if it is one on packed sequences whose lengths
    are known, or else the function itself."""
    own = _FUNCTIONS.get(function) if isinstance(function, _BUILTIN) else None
    if own is None:
        return function  # type: ignore[no-any-return]

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        return function(*args, **kwargs) if result is NotImplemented else result

    return call


def refuse_later_terms(module: fx.GraphModule, others_add: bool) -> None:
    """Raise ``CaptureError`` if the gradient of a recurrent layer's weights, a sum with one term per step, is added to
    another gradient: eager adds the terms one by one. ``others_add``: other gradients are also added outside of the
    program."""
    for node in module.graph.find_nodes(op="call_function", target=BACKWARD):
        wanted: Any = [place for place, is_wanted in enumerate(node.args[2]) if is_wanted]
        of_weights = [user for user in node.users if wanted[user.args[1]] > len(node.args[6])]
        later = any(one.target is _ADD and one.args[1] is each for each in of_weights for one in each.users)
        if of_weights and (later or others_add):
            raise CaptureError(
                "a recurrent layer over packed sequences is run by its own code here, since others may add to the gradients of "
                "its weights: eager adds up those of all steps in one order."
            )
