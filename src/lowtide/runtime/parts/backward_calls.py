"""Submodules that the backward pass calls, such as reversible layers, which save nothing and recompute their inputs.

Custom autograd functions call modules in their backward pass, and differentiate the results right there. In the forward
pass they call them with gradients disabled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lowtide.runtime.calls.result_hooks import tell
from lowtide.runtime.parts.shared import SharedBudget

_TRIED = 2  # steps after which backward passes without such calls are taken to have none


class BackwardCalls:
    """Enters ``installed`` when a backward pass reaches the model's results, and leaves it at the end of the pass, if
    submodules were called with gradients disabled (``hidden``). ``found``: whether a backward pass called any."""

    def __init__(self, shared: SharedBudget, installed: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.hidden = self.found = False
        self._shared = shared
        self._installed = installed
        self._entered: contextlib.AbstractContextManager[None] | None = None
        self._steps = 0

    @property
    def are_under_way(self) -> bool:
        return self._entered is not None

    @property
    def may_be(self) -> bool:
        """Whether backward passes call submodules, as far as is known."""
        return self.hidden and (self.found or self._steps < _TRIED)

    def returned(self, result: Any) -> None:
        if self.may_be:
            self._steps += 1
            tell(result, self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        if self._entered is None:
            self._entered = self._installed()
            self._entered.__enter__()
            self._shared.begin_nested()
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)

    def leave(self) -> None:
        """The backward pass has ended or failed."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(None, None, None)
            self._shared.end_nested()
