"""Submodules that the backward pass calls: those of reversible layers, say, which keep nothing and compute their inputs anew.

Functions with a backward pass of their own call modules in it, and differentiate what they return there and then. In the
forward pass they call them where nothing is recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lowtide.runtime.calls.result_hooks import tell
from lowtide.runtime.parts.shared import SharedBudget

_TRIED = 2  # steps, before it is known that the backward pass calls none


class BackwardCalls:
    """``installed`` is entered where a backward pass comes to what the model returned, if submodules were called with nothing
    recorded (``hidden``), and left where it ends. ``found``: whether one has called any."""

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
        """The backward pass has ended, or failed before."""
        if self._entered is not None:
            entered, self._entered = self._entered, None
            entered.__exit__(None, None, None)
            self._shared.end_nested()
