"""The memory that steps without plans take."""

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
    """Measures steps. A step begins with the first call after a backward pass and ends with its last backward pass.

    - ``peak_bytes``: the most that a step allocated so far, above what was allocated at its start; 0 until one has
      ended.
    - ``are_its_own``: whether steps contain nothing else: no gradients for what computed the arguments, and no planned
      passes except those of the parts in ``shared``.
    - ``grew``: whether the latest call had larger arguments, or more ``trained_bytes`` of parameters, than all before.
    """

    def __init__(self, shared: SharedBudget, trained_bytes: Callable[[], int]) -> None:
        self.peak_bytes = 0
        self.are_its_own = True
        self.grew = False
        self._largest = 0, 0  # most bytes of a call's arguments, and of trained parameters
        self._trained_bytes = trained_bytes
        self._window: PeakWindow | None = None
        self._shared = shared
        self._passes = 0  # planned passes of others when the step began
        self._ended = self._ending = False  # a backward pass ended; a callback for its end is queued

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
        """A call has these arguments. Returns whether they are larger than those before."""
        tensors = structure.flatten(arguments)[0]
        if any(tensor.grad_fn is not None for tensor in tensors):
            self.are_its_own = False
        now = strided_bytes(tensors), self._trained_bytes()
        outgrown = self._are_below(now)
        self.grew = any(map(operator.gt, now, self._largest))
        self._largest = max(now[0], self._largest[0]), max(now[1], self._largest[1])
        return outgrown

    def are_outgrown(self, arguments: Any) -> bool:
        """Whether these arguments, or the trained parameters, are larger than before, so that a step may take more
        memory."""
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
