"""Gradients that move to a second memory as soon as they are final, until the optimizer's step uses them one by one.
Meanwhile, ``.grad`` is an ``AwayTensor``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from lowtide.offload import open_memory
from lowtide.offload.interface import ALIGNMENT
from lowtide.program.program import Program
from lowtide.program.updates import with_departures
from lowtide.runtime.updates.away import AwayTensor, Place, Transfer


class MovingGradients:
    """The gradients of ``parameters`` that may lie in the second memory of the given name. ``sent``: whether the
    current or latest backward pass moved any."""

    def __init__(self, memory: str, parameters: Sequence[torch.Tensor]) -> None:
        self._memory, self._parameters = memory, parameters
        self.sent = False

    def leaving(self, program: Program, positions: Collection[int]) -> Program:
        """``program`` with operators that move the gradients of the flat inputs ``positions`` away."""
        return with_departures(program, positions, Transfer("SendGradient", self.send), ALIGNMENT)

    def send(self, gradient: torch.Tensor, parameter: torch.Tensor) -> Callable[[], None]:
        """Add ``gradient`` to that of ``parameter`` and begin to move it away; do nothing if the parameter was frozen
        since the forward pass. Returns a function that waits for this. It raises an error and leaves the gradient in
        memory if it cannot be written."""
        if not parameter.requires_grad:
            return lambda: None
        self.sent = True
        before = parameter.grad
        if before is not None:
            with torch.no_grad():
                gradient = (before.fetched() if isinstance(before, AwayTensor) else before).add_(gradient)
        place = self._place(parameter, gradient)
        parameter.grad = AwayTensor(gradient, place)
        leaving = [gradient]

        def end() -> None:
            try:
                place.copy.left()
            except BaseException:
                parameter.grad = leaving[0]
                raise
            finally:
                leaving.clear()

        return end

    def _place(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Place:
        """Room of its own for each pass: code may still read the gradient of an earlier one."""
        nbytes = -(-gradient.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        return Place(open_memory(self._memory, parameter.device).lease(nbytes), 0, gradient)

    def begin(self) -> None:
        """A backward pass begins and adds to existing gradients: fetch those."""
        self.sent = False
        self.bring_home()

    def bring_home(self) -> None:
        """Fetch all gradients that are away."""
        for parameter in self._parameters:
            if isinstance(parameter.grad, AwayTensor):
                parameter.grad = parameter.grad.fetched()


def begin_gradient(parameter: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Begin to fetch the gradient of ``parameter``, if it is away. Returns a function that waits for it."""
    gradient = parameter.grad
    return gradient.place.begin() if isinstance(gradient, AwayTensor) else lambda: gradient
