"""A placeholder in ``.grad`` for a gradient that the update of its parameter has used up.

It has the gradient's shape and type but no memory. ``optimizer.step()`` does not see it (``updates.optimizer``), and
``zero_grad`` removes it. Any other code that would read it (clipping by a norm, a gradient scaler, a log of norms, a
gradient to be added) gets an error that says that the gradient is gone, instead of a wrong result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from lowtide.errors import ExecutionError

_ATEN = torch.ops.aten
_ZEROING = (_ATEN.zero_.default, _ATEN._foreach_zero_.default)
_ELSEWHERE = (_ATEN.detach.default, _ATEN.alias.default, _ATEN._to_copy.default)


class SpentGradient(torch.Tensor):
    """A gradient without memory. ``is_zeroed``: whether it was set to zero since, and so counts as no gradient."""

    is_zeroed: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> SpentGradient:
        made: SpentGradient = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=device
        )
        made.is_zeroed = False
        return made

    @classmethod
    def of(cls, parameter: torch.Tensor) -> SpentGradient:
        return cls(parameter.shape, parameter.stride(), parameter.dtype, parameter.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ZEROING:
            for one in args[0] if isinstance(args[0], (list, tuple)) else args[:1]:
                if isinstance(one, SpentGradient):
                    one.is_zeroed = True
                else:
                    one.zero_()
            return args[0]
        if func in _ELSEWHERE and isinstance(args[0], SpentGradient):
            own, given = args[0], kwargs or {}
            return cls(own.shape, own.stride(), given.get("dtype") or own.dtype, given.get("device") or own.device)
        if func is _ATEN.add_.Tensor and isinstance(args[0], SpentGradient):
            raise ExecutionError(
                f"a gradient is added to that of a parameter of shape {list(args[0].shape)}, with which its optimizer has "
                "updated the parameter in the backward pass already. Where another backward pass adds to gradients, call "
                "optimizer.zero_grad() before it, or run those before the last inside lowtide.accumulating(model); where the "
                "loss uses parameters outside of the model (a penalty on weights, say), compute it in the model's forward, or "
                "leave out optimizer= in lowtide.rematerialize."
            )
        raise ExecutionError(
            f"{func} needs the gradient of a parameter of shape {list(_shape(args))}, but its optimizer has updated the "
            "parameter with it in the backward pass already, and it is gone. For what needs gradients between backward() and "
            "step() (clipping by their norm, GradScaler, logging), give lowtide.rematerialize keep_gradients=True, or run the "
            "forward and backward pass inside lowtide.accumulating(model); for the step of another optimizer (of a next stage "
            "of training), call lowtide.restore(model) before it, and lowtide.rematerialize with that one."
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={list(self.shape)}, dtype={self.dtype}: used by the update of its parameter)"


class SpentGradients:
    """One placeholder per parameter, remade if the parameter's shape, type or device changes."""

    def __init__(self) -> None:
        self._latest: dict[int, SpentGradient] = {}

    def made(self, parameter: torch.Tensor) -> SpentGradient:
        """The placeholder for a gradient that was used now."""
        spent, kind = self._latest.get(id(parameter)), (parameter.shape, parameter.dtype, parameter.device)
        if spent is None or (spent.shape, spent.dtype, spent.device) != kind:
            spent = self._latest[id(parameter)] = SpentGradient.of(parameter)
        spent.is_zeroed = False
        return spent

    def show(self, updated: Mapping[int, torch.Tensor]) -> None:
        """Put placeholders into ``.grad`` of updated parameters without a gradient."""
        for key, parameter in updated.items():
            if parameter.grad is None:
                parameter.grad = self._latest[key]

    def hide(self, updated: Mapping[int, torch.Tensor], all_of: Collection[int]) -> None:
        """Remove placeholders from ``.grad``, and any gradient of the parameters ``all_of``."""
        for key, parameter in updated.items():
            if key in all_of or isinstance(parameter.grad, SpentGradient):
                parameter.grad = None

    def replaced(self, keys: Collection[int], updated: Mapping[int, torch.Tensor]) -> set[int]:
        """Those ``keys`` of updated parameters whose ``.grad`` is no longer the placeholder, or was set to zero."""
        gradients = ((key, updated[key].grad) for key in keys)
        return {key for key, one in gradients if not isinstance(one, SpentGradient) or one.is_zeroed}


def fill_zeroed(optimizer: torch.optim.Optimizer) -> None:
    """Replace placeholders that were set to zero by real zeros, since other gradients may be added to them now."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if isinstance(parameter.grad, SpentGradient) and parameter.grad.is_zeroed:
            parameter.grad = torch.zeros_like(parameter)


def _shape(args: Any) -> torch.Size:
    for one in args:
        found = (
            next((each for each in one if isinstance(each, SpentGradient)), one)
            if isinstance(one, (list, tuple))
            else one
        )
        if isinstance(found, SpentGradient):
            return found.shape
    return torch.Size()
