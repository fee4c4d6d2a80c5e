"""How much memory steps take that run as they are, or may come to."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from lowtide.memory.allocators import PeakWindow, meter_of
from lowtide.objects import structure
from lowtide.program.sizes import strided_bytes
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.calls.result_hooks import tell
from lowtide.runtime.parts.shared import SharedBudget


class EagerSteps:
    """``peak_bytes``: the most that a step has allocated so far, above what was allocated when it began. A step begins with a
    call after a backward pass has ended, and ends with its last backward pass; 0 until one has ended. ``are_its_own``: whether
    nothing else is seen in them: no gradients of what its arguments were computed from, and no passes by plans but those of
    its parts, which share ``shared``. ``grew``: whether the arguments of the latest call are larger than any before, or more of
    the model is trained, which has ``trained_bytes`` of parameters that are."""

    def __init__(self, shared: SharedBudget, trained_bytes: Callable[[], int]) -> None:
        self.peak_bytes = 0
        self.are_its_own = True
        self.grew = False
        self._largest = 0, 0  # bytes of the arguments of a call, and of trained parameters
        self._trained_bytes = trained_bytes
        self._window: PeakWindow | None = None
        self._shared = shared
        self._passes = 0  # by plans of others, when the step began
        self._ended = self._ending = False  # whether a backward pass has ended, and whether it is told of one's end

    def begin(self, device: torch.device) -> None:
        """A call is about to run."""
        if self._window is None or self._ended:
            if self._window is not None:
                self._window.close()
            meter, self._passes = meter_of(device), ModelCall.begun - len(self._shared.ran.pending())
            self._window = None if meter is None else PeakWindow(meter)
            self._ended = False
        self._ending = False  # also after a backward pass that failed

    def given(self, arguments: Any) -> bool:
        """A call takes these arguments; whether they have outgrown those before."""
        tensors = structure.flatten(arguments)[0]
        if any(tensor.grad_fn is not None for tensor in tensors):
            self.are_its_own = False
        now = strided_bytes(tensors), self._trained_bytes()
        outgrown = self._are_below(now)
        self.grew = any(map(operator.gt, now, self._largest))
        self._largest = max(now[0], self._largest[0]), max(now[1], self._largest[1])
        return outgrown

    def are_outgrown(self, arguments: Any) -> bool:
        """Whether these arguments are larger than those of the calls before, or more is trained, so that a step may take more
        than any of these."""
        return self._are_below((strided_bytes(structure.flatten(arguments)[0]), self._trained_bytes()))

    def _are_below(self, now: tuple[int, int]) -> bool:
        return any(0 < largest < one for largest, one in zip(self._largest, now, strict=True))

    def returned(self, result: Any) -> None:
        tell(result, self._in_backward)

    def _in_backward(self, _: torch.Tensor) -> None:
        self._shared.in_backward()
        if not self._ending and self._window is not None:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._note)

    def _note(self) -> None:
        self._ending = False
        if self._window is not None:
            self._ended = True
            self.peak_bytes = max(self.peak_bytes, self._window.peak_bytes)
            self.are_its_own &= self._passes == ModelCall.begun - len(self._shared.ran)
