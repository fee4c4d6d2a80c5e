"""Tensors in memory that is not PyTorch's, such as a NumPy array's. The tracer takes them for constants, and writes
into them for values of the program: nothing would be written into the array."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.errors import CaptureError
from lowtide.objects.walk import CONTAINERS, reachable
from lowtide.program.layouts import stretch_of

LIFT = torch.ops.aten.lift_fresh.default


class _Lifted(NamedTuple):
    """A ``real`` tensor in foreign memory, and the tracer's tensor for it."""

    real: torch.Tensor
    functional: Any


def note_lifted(mode: Any, real: Any, functional: Any) -> None:
    """Record that the functional ``mode`` has made ``functional`` from ``real``."""
    if isinstance(functional, FunctionalTensor) and _is_foreign(real):
        vars(mode).setdefault("lifted", []).append(_Lifted(real, functional))


def _is_foreign(real: Any) -> bool:
    plain = type(real) in (torch.Tensor, nn.Parameter, nn.Buffer) and real.device.type == "cpu"
    return plain and real.layout is torch.strided and not real.untyped_storage().resizable()


def refuse_array_writes(
    own: Iterable[Any], read: Iterable[Any], given: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> Callable[[], None]:
    """Raise ``CaptureError`` if the trace has written, through a tensor, into the memory of a NumPy array. Returns a
    function that checks again, for the end of the backward pass.

    Arrays that outlive the call are looked for, also in containers. ``own``: the arguments and the model's copy.
    ``read``: other objects that the trace has read. ``given``: pairs of a real tensor and the functional one that
    represents it; a write into one of them counts if it shares memory with an array in ``read``.
    """
    read = _arrays(read)
    mode: Any = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    lifted: list[_Lifted] = vars(mode).setdefault("lifted", [])
    own = [*_arrays(own), *read]
    shown = [_Lifted(*pair) for pair in given if read and _is_foreign(pair[0])]

    def refuse() -> None:
        pairs = [*((one, own) for one in lifted), *((one, read) for one in shown)]
        written = [pair for pair in pairs if _is_written(pair[0].functional)]
        if not written:
            return
        with _disable_current_modes():
            views = {id(one): _bytes_of(one.real) for one in (*lifted, *(one for one, _ in written))}
        for one, arrays in written:
            others = [views[id(other)] for other in lifted if other is not one]  # tensors that share its memory
            _refuse(any(np.may_share_memory(views[id(one)], array) for array in (*arrays, *others)))

    refuse()
    return refuse


def refuse_changed_arrays(arrays: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Raise ``CaptureError`` if one of these arrays, which share memory with tensors in eager, differs from its
    copy."""
    _refuse(any(array.tobytes() != before.tobytes() for array, before in arrays))


def _arrays(some: Iterable[Any]) -> list[np.ndarray]:
    found = reachable(some, lambda one: isinstance(one, CONTAINERS))
    return [one for one in found if isinstance(one, np.ndarray)]


def _bytes_of(real: torch.Tensor) -> np.ndarray:
    """The memory that the tensor spans, as bytes, since NumPy does not have all types of PyTorch."""
    return stretch_of(real.detach()).view(torch.uint8).numpy()


def _is_written(functional: FunctionalTensor) -> bool:
    return bool(torch._functionalize_has_data_mutation(functional.elem))  # type: ignore[attr-defined]


def _refuse(shares: bool) -> None:
    if shares:
        raise CaptureError(
            "the forward pass writes into memory that an array of NumPy's and a tensor share (torch.from_numpy(array), "
            "tensor.numpy()), which no plan can follow. Keep what changes in a buffer (self.register_buffer(name, tensor)), "
            "write into a copy (torch.tensor(array), tensor.numpy().copy()), or run the model under lowtide.online."
        )
