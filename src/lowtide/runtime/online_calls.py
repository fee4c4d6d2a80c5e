"""A model whose calls run under ``lowtide.online``."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide.dynamic.context import leave_if_innermost, online


class OnlineCalls:
    """Within ``budget_bytes``, from a call on until an optimizer steps that has parameters of the model: its states, and what
    the thread does until the next call, are outside."""

    def __init__(self, model: nn.Module, budget_bytes: int, device: torch.device) -> None:
        self._context, self._model = online(budget_bytes, device=device), weakref.ref(model)
        self._entered = False
        own = weakref.WeakMethod(self._before_step)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            method = own()
            if method is not None:
                method(optimizer)

        hook = register_optimizer_step_pre_hook(before_step)
        weakref.finalize(self, hook.remove).atexit = False
        weakref.finalize(self, leave_if_innermost, self._context).atexit = False

    def enter(self) -> None:
        """A call is about to run."""
        if not self._entered:
            self._context.__enter__()
            self._entered = True

    def leave(self) -> None:
        """What is held becomes as without the context."""
        if self._entered:
            self._entered = False
            self._context.__exit__(None, None, None)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        model = self._model()
        if not self._entered or model is None:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if any(id(parameter) in stepped for parameter in model.parameters()) and leave_if_innermost(self._context):
            self._entered = False
