"""What traced code is told when it asks for the class of a tensor: the class of the tensor that the traced one
represents.

``isinstance`` already answers so, but ``type(x) is torch.Tensor`` is false for a traced tensor and would take another
branch than in eager. So ``type`` is ``Type`` in the modules whose code asks, and ``x.__class__`` answers alike
(``guards.classes_shown``).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.trace.patches import InPlace
from lowtide.errors import CaptureError
from lowtide.program.layouts import memory_of
from lowtide.program.source import is_user_file, user_source

TRACED = (FunctionalTensor, FakeTensor)
_TENSOR: Any = torch.Tensor
IS_LEAF, GRAD_FN = _TENSOR.is_leaf.__get__, _TENSOR.grad_fn.__get__
# Questions that traced tensors, or other calls, answer differently.
_UNKNOWN: dict[Any, str] = {
    **{getattr(_TENSOR, name).__get__: name for name in ("_version", "_base", "_backward_hooks")},
    **{getattr(_TENSOR, name): f"{name}()" for name in ("storage_offset", "untyped_storage", "is_shared", "_is_view")},
}


class _Asking(InPlace):
    """Metaclass of ``Type``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return class_of(args[0])
        made = type(*args, **kwargs)
        if len(args) == 3 and "__module__" not in args[2]:  # that of the calling code
            made.__module__ = sys._getframe(1).f_globals.get("__name__", made.__module__)
        return made


class Type(metaclass=_Asking):
    """Replaces ``type``."""

    original = type


def fake_of(traced: Any) -> Any:
    """The fake tensor that a traced tensor wraps or is."""
    return traced.from_functional() if isinstance(traced, FunctionalTensor) else traced


def class_of(value: Any) -> type:
    """``type(value)``; for a traced tensor or a stand-in for a number, the class of what it represents."""
    kind: type = type(value)
    if issubclass(kind, torch.SymFloat):
        return value.__class__  # type: ignore[no-any-return]
    if not issubclass(kind, TRACED):
        return kind
    return nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor  # isinstance asks for the class too


def mark_parameters(traced: Iterable[torch.Tensor], owns: Iterable[torch.Tensor]) -> None:
    """Make ``isinstance(tensor, nn.Parameter)`` true for the traced tensors that represent parameters."""
    for tensor, own in zip(traced, owns, strict=True):
        if isinstance(own, nn.Parameter):
            tensor._is_param = True


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether the parameter or buffer that a traced tensor represents is a leaf. Raises ``CaptureError`` for an
    argument that requires a gradient, since one plan serves leaves and others."""
    if tensor.requires_grad and not getattr(tensor, "_is_param", False):
        raise CaptureError(
            f"the forward pass asks whether an argument that requires a gradient is a leaf ({user_source()}), which no plan "
            "knows. Decide it outside of the model."
        )
    return True


def refuse_unknown(function: Any, calling: FrameType, tensor: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
    """Raise ``CaptureError`` if user code, in the frame ``calling``, asks a ``tensor`` for something that no plan
    knows. The ``_version`` of a tensor that the pass has made is known; that of a ``given`` tensor is not."""
    if function not in _UNKNOWN:
        return
    if (
        _UNKNOWN[function] == "_version"
        and isinstance(tensor, TRACED)
        and memory_of(tensor) not in map(memory_of, given)
    ):
        return
    if calling.f_code is torch.overrides.handle_torch_function.__code__ or is_user_file(calling.f_code.co_filename):
        raise CaptureError(
            f"the forward pass asks a tensor for its {_UNKNOWN[function]} ({user_source()}), which no plan knows: it is "
            "another one in other calls. Decide by it outside of the model, or run the model under lowtide.online."
        )


def attribute_of(tensor: torch.Tensor, name: str) -> Any:
    return class_of(tensor) if name == "__class__" else torch.Tensor.__getattribute__(tensor, name)


def unregistered(shape: torch.Size) -> CaptureError:
    """The error for a tensor that requires a gradient and is no input of the program."""
    return CaptureError(
        f"the model computes with a tensor of shape {tuple(shape)} that requires a gradient and is none of its "
        "parameters (it is held in a closure or a global), so its gradient would be lost. Register it "
        "(nn.ParameterList, nn.ParameterDict, or self.weight = nn.Parameter(...)), or make it an argument of the call."
    )
