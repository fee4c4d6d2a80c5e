"""Hooks on results: ``tell`` reports a backward pass; ``refuse_hooks`` refuses hooks on a gradient that never exists as
a whole."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.code_names import is_trusted
from lowtide.errors import ExecutionError
from lowtide.objects import structure
from lowtide.objects.walk import variables

_ENGINE = torch.autograd.graph._engine_run_backward.__code__  # its arguments include the inputs to differentiate for


def tell(result: Any, reached: Callable[[torch.Tensor], None]) -> None:
    """Call ``reached`` when a backward pass reaches any tensor of ``result``; these tensors keep it alive. It runs
    before all other hooks on them, since those may call submodules themselves (cached gradients)."""
    for tensor in structure.flatten(result)[0]:
        if tensor.requires_grad and not isinstance(tensor, nn.Parameter):
            hooks: Any = tensor._backward_hooks or {}
            others = dict(hooks)
            hooks.clear()
            tensor.register_hook(reached)  # type: ignore[no-untyped-call]
            hooks.update(others)


def refuse_hooks(tensor: torch.Tensor) -> None:
    """Raise ``ExecutionError`` in the backward pass if the gradient of this result is observed. Other results are
    computed from it, so its gradient is summed inside the program, where no hook sees it."""
    reference = weakref.ref(tensor)

    def check(_: torch.Tensor | None) -> None:
        result = reference()
        if result is None:
            return
        hooks = (result._backward_hooks or {}).values()
        if result.retains_grad or _is_asked_for(result) or not all(map(is_trusted, hooks)):
            raise ExecutionError(
                "a result of the model has a hook or retain_grad(), or its gradient is asked for (torch.autograd.grad), and "
                "other results are computed from it inside the model: in a planned call its gradient is never there as a "
                "whole. Call lowtide.restore(model) for that part of the work, or run it under lowtide.online."
            )

    tensor.register_hook(check)  # type: ignore[no-untyped-call]


def _is_asked_for(result: torch.Tensor) -> bool:
    """Whether a running backward pass is for the gradient of this very tensor (``torch.autograd.grad``). The engine
    does not tell, but the frame of the call that started it, perhaps in another thread, does."""
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code is _ENGINE:
                given = variables(caller).get("args", ())
                if any(asked is result for asked in (given[3] if len(given) > 3 else ())):
                    return True
            caller = caller.f_back
    return False
