"""How much memory steps take that run as they are."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.memory.allocators import PeakWindow, meter_of
from lowtide.objects import structure
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.calls.result_hooks import tell
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.sharing import Constraint


class EagerSteps:
    """``peak_bytes``: the most that a step has allocated so far, above what was allocated when it began, and ``latest_bytes``
    the latest one. A step begins with a call after a backward pass has ended, and ends with its last backward pass; 0 until one
    has ended. ``are_its_own``: whether nothing else is seen in them: no gradients of what its arguments were computed from, and
    no passes by plans but those of parts of the model, which ``shared`` knows."""

    def __init__(self, shared: SharedBudget) -> None:
        self.peak_bytes = self.latest_bytes = 0
        self.are_its_own = True
        self._shared = shared
        self._window: PeakWindow | None = None
        self._passes = 0  # by plans, when the step began
        self._ended = self._ending = False  # whether a backward pass has ended, and whether it is told of one's end

    def begin(self, device: torch.device | None) -> None:
        """A call is about to run on this device, or one of a step that does not count (``None``)."""
        if self._window is None or self._ended or device is None:
            if self._window is not None:
                self._window.close()
            meter, self._passes = None if device is None else meter_of(device), ModelCall.begun
            self._window = None if meter is None else PeakWindow(meter)
            self._ended = False
        self._ending = False  # also after a backward pass that failed

    def given(self, arguments: Any) -> None:
        if any(tensor.grad_fn is not None for tensor in structure.flatten(arguments)[0]):
            self.are_its_own = False

    def exceeded(self, at_once: bool) -> int | None:
        """The budget, where steps are the model's own and the latest one exceeds it, or it holds ``at_once``. One in percent is
        of the largest step so far."""
        if not self.are_its_own or not (self.peak_bytes or at_once):
            return None
        budget_bytes, _ = self._shared.budget_for([], [Constraint(self.peak_bytes, -1, False, ())])
        return budget_bytes if self.latest_bytes > budget_bytes or at_once else None

    def returned(self, result: Any) -> None:
        tell(result, self._in_backward)

    def _in_backward(self, _: torch.Tensor) -> None:
        if not self._ending and self._window is not None:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._ending = False
        if self._window is not None:
            self._ended = True
            self.latest_bytes = self._window.peak_bytes
            self.peak_bytes = max(self.peak_bytes, self.latest_bytes)
            self.are_its_own &= ModelCall.begun - self._passes <= len(self._shared.ran)
