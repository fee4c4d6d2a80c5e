"""Gradients that leave for a second memory as soon as they are final, until the optimizer's step takes them one by one. In
``.grad`` such a gradient is an ``AwayTensor``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from lowtide.offload import open_memory
from lowtide.offload.interface import ALIGNMENT
from lowtide.program.program import Program
from lowtide.program.updates import with_departures
from lowtide.runtime.updates.away import AwayTensor, Place, Transfer


class MovingGradients:
    """Gradients of ``parameters``, which may lie in a second memory, by its name. ``sent``: whether the backward pass that is
    under way, or was last, has sent any."""

    def __init__(self, memory: str, parameters: Sequence[torch.Tensor]) -> None:
        self._memory, self._parameters = memory, parameters
        self.sent = False

    def leaving(self, program: Program, positions: Collection[int]) -> Program:
        """``program``, in whose backward pass gradients of the flat inputs ``positions`` leave."""
        return with_departures(program, positions, Transfer("SendGradient", self.send), ALIGNMENT)

    def send(self, gradient: torch.Tensor, parameter: torch.Tensor) -> Callable[[], None]:
        """Add ``gradient`` to that of ``parameter``, unless that was frozen since the forward pass, and begin to send it away.
        Called, what is returned waits for that, and raises ``ExecutionError`` where it cannot be written: then it stays."""
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
        """Room of its own: whoever still has the gradient of an earlier pass may read it."""
        nbytes = -(-gradient.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        return Place(open_memory(self._memory, parameter.device).lease(nbytes), 0, gradient)

    def begin(self) -> None:
        """A backward pass begins, which adds to what is there."""
        self.sent = False
        self.bring_home()

    def bring_home(self) -> None:
        """Fetch all that are away."""
        for parameter in self._parameters:
            if isinstance(parameter.grad, AwayTensor):
                parameter.grad = parameter.grad.fetched()


def begin_gradient(parameter: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Begin to fetch the gradient of ``parameter``, if it is away. Called, what is returned gives it."""
    gradient = parameter.grad
    return gradient.place.begin() if isinstance(gradient, AwayTensor) else lambda: gradient
