"""What the blocks of a model are called with, seen while the whole model is captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.trace.fake import known_value
from lowtide.errors import PlanError
from lowtide.program import structure
from lowtide.program.layouts import without_memory

Sample = tuple[tuple[Any, ...], dict[str, Any]]


class BlockCalls:
    """Notes the first call of each of the modules ``names`` of every model that it is shown.

    Floating tensors in the samples have no memory behind them; integers that derive from the call's own have their values.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.found: dict[str, Sample] = {}

    def watch(self, model: nn.Module) -> None:
        for name in self.names:
            model.get_submodule(name).register_forward_pre_hook(self._recorder(name), with_kwargs=True)

    def samples(self) -> list[Sample]:
        """``(args, kwargs)`` per name. Raises ``PlanError`` where a module was not called."""
        missing = next((name for name in self.names if name not in self.found), None)
        if missing is not None:
            raise PlanError(f"block {missing!r} is not called in the model's forward pass.")
        return [self.found[name] for name in self.names]

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in self.found:
                tensors, tree = structure.flatten_distinct((args, kwargs))
                self.found[name] = structure.unflatten(tree, [_without_memory(tensor) for tensor in tensors])

        return record


def _without_memory(traced: torch.Tensor) -> torch.Tensor:
    requires_grad = traced.requires_grad
    known = known_value(traced)
    if isinstance(traced, FunctionalTensor):
        traced = torch._from_functional_tensor(traced.elem)
    with _disable_current_modes():
        if known is not None:
            return known.clone()
        return without_memory(traced).requires_grad_(requires_grad)
