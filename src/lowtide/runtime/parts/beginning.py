"""Detect that the first calls of a model change its state once, as when its first batch initializes it. Those calls
cannot be captured; later ones may be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.code_names import is_trusted

_CALLS = 3  # first calls that may initialize a model


class Beginning:
    """Watches a model whose first call could not be captured."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._flags = [*_flags(model)]
        self._calls = 0

    def has_turned(self) -> bool:
        """Whether earlier calls have flipped any of its flags since the last look."""
        self._calls += 1
        model = self._model()
        if model is None or self._calls > _CALLS:
            return False
        before, self._flags = self._flags, [*_flags(model)]
        return before != self._flags


def _flags(model: nn.Module) -> Iterator[Any]:
    """The yes-or-no state of a model: truth values of attributes, which tensors exist, and truth values of buffers with
    one element."""
    for module in model.modules():
        if is_trusted(type(module)):
            continue
        for name, value in vars(module).items():
            if value is None or type(value) in (bool, int):
                yield name, bool(value)
            elif isinstance(value, torch.Tensor):
                yield name
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() == 1 and buffer.device.type != "meta":
                yield name, bool(buffer)
