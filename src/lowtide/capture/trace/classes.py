"""What code is told that asks for the class of a tensor while it is traced: that of the tensor which the traced one stands for.

``isinstance`` says the same of both, but ``type(x) is torch.Tensor`` does not, and would take another branch than eager code.
So the name ``type`` stands for ``Type`` in the modules whose code asks, and ``x.__class__`` says what that does
(``guards.classes_shown``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.errors import CaptureError
from lowtide.program.source import user_source

TRACED = (FunctionalTensor, FakeTensor)
IS_LEAF = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]


class _Asking(type):
    """Of ``Type``, which is asked as ``type`` is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __subclasscheck__(cls, value: Any) -> bool:
        return value is cls or issubclass(value, type)

    def __getattr__(cls, name: str) -> Any:
        return getattr(type, name)


class Type(metaclass=_Asking):
    """In the place of ``type``."""


def class_of(value: Any) -> type:
    """``type(value)``, or the class of what a traced tensor stands for."""
    kind: type = type(value)
    if not issubclass(kind, TRACED):
        return kind
    return nn.Parameter if getattr(value, "_is_param", False) else torch.Tensor  # isinstance asks for the class, too


def mark_parameters(traced: Iterable[torch.Tensor], owns: Iterable[torch.Tensor]) -> None:
    """Have ``isinstance`` take those for parameters that stand for one, which are of another class."""
    for tensor, own in zip(traced, owns, strict=True):
        if isinstance(own, nn.Parameter):
            tensor._is_param = True


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether the parameter that a traced tensor stands for is a leaf. Raises ``CaptureError`` for an argument, of which a plan
    serves both kinds."""
    if not getattr(tensor, "_is_param", False):
        raise CaptureError(
            f"the forward pass asks whether an argument that requires a gradient is a leaf ({user_source()}), which no plan "
            "knows. Decide it outside of the model."
        )
    return True


def attribute_of(tensor: torch.Tensor, name: str) -> Any:
    return class_of(tensor) if name == "__class__" else torch.Tensor.__getattribute__(tensor, name)
