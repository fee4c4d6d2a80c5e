"""Gradients that leave for a second memory as soon as they are final, until the optimizer's step takes them one by one.

In ``.grad`` such a gradient is an ``AwayGradient``. Whoever reads it fetches it for that moment, and whoever writes into it has
it fetched, written and taken back, so that clipping by the norm of all holds one of them at a time. A view of it stays what it
is a view of: then the gradient is there for good.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lowtide.offload import Copy, Lease, open_memory
from lowtide.offload.interface import ALIGNMENT
from lowtide.program.program import Program
from lowtide.program.updates import with_departures
from lowtide.runtime.updates.away import AwayTensor


class _Place:
    """Where a gradient is: in its room of the second memory, or ``here``."""

    def __init__(self, lease: Lease, gradient: torch.Tensor) -> None:
        self.lease = lease
        self.copy: Copy = lease.offload(0, (gradient,))
        self.here: torch.Tensor | None = None

    def begin(self) -> Callable[[], torch.Tensor]:
        """Begin to fetch the gradient. Called, what is returned waits for it, and raises ``ExecutionError`` where it cannot be
        read."""
        if self.here is not None:
            there = self.here
            return lambda: there
        copy = self.copy
        copy.left()
        found = copy.fetch()

        def end() -> torch.Tensor:
            copy.back()
            return found.pop()

        return end

    def take(self, gradient: torch.Tensor) -> None:
        """It was fetched and has other values now."""
        if self.here is None:
            self.here = gradient  # where it cannot be written
            self.copy = self.lease.offload(0, (gradient,))
            self.copy.left()
            self.here = None


class AwayGradient(AwayTensor):
    """A gradient in a second memory."""

    place: _Place

    def fetched(self) -> torch.Tensor:
        """The gradient. Raises ``ExecutionError`` where it cannot be read."""
        return self.place.begin()()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0], args[0].place)
        schema, given = func._schema, kwargs or {}
        pairs = list(zip(schema.arguments, args, strict=False))
        pairs += [(one, given[one.name]) for one in schema.arguments if one.name in given]
        shared = [(one.alias_info, value) for one, value in pairs if one.alias_info is not None]
        there: dict[int, torch.Tensor] = {}
        away: dict[int, AwayGradient] = {}

        def fetched(one: AwayGradient) -> torch.Tensor:
            if id(one.place) not in there:
                there[id(one.place)] = one.fetched()
            away[id(there[id(one.place)])] = one
            return there[id(one.place)]

        def places(writes: bool) -> list[_Place]:
            leaves = pytree.tree_leaves([value for alias, value in shared if alias.is_write == writes])
            return [one.place for one in leaves if isinstance(one, AwayGradient)]

        result = func(*_there(fetched, args), **_there(fetched, given))
        for place in places(writes=False):  # of views, which whoever has them may write into
            place.here = there[id(place)]
        for place in places(writes=True):
            place.take(there[id(place)])
        return away.get(id(result), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.fetched().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetched().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AwayGradient(shape={list(self.shape)}, dtype={self.dtype})"


class MovingGradients:
    """Gradients of ``parameters``, which may lie in a second memory, by its name. ``sent``: whether the backward pass that is
    under way, or was last, has sent any."""

    def __init__(self, memory: str, parameters: Sequence[torch.Tensor]) -> None:
        self._memory, self._parameters = memory, parameters
        self.sent = False

    def leaving(self, program: Program, positions: Collection[int]) -> Program:
        """``program``, in whose backward pass gradients of the flat inputs ``positions`` leave."""
        return with_departures(program, positions, SendGradient(self), ALIGNMENT)

    def send(self, parameter: torch.Tensor, gradient: torch.Tensor) -> Callable[[], None]:
        """Add ``gradient`` to that of ``parameter``, and begin to send it away. Called, what is returned waits for that, and
        raises ``ExecutionError`` where it cannot be written: then it stays."""
        self.sent = True
        before = parameter.grad
        if before is not None:
            with torch.no_grad():
                gradient = (before.fetched() if isinstance(before, AwayGradient) else before).add_(gradient)
        place = self._place(parameter, gradient)
        parameter.grad = AwayGradient(gradient, place)
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

    def _place(self, parameter: torch.Tensor, gradient: torch.Tensor) -> _Place:
        """Room of its own: whoever still has the gradient of an earlier pass may read it."""
        nbytes = -(-gradient.untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT
        return _Place(open_memory(self._memory, parameter.device).lease(nbytes), gradient)

    def begin(self) -> None:
        """A backward pass begins, which adds to what is there."""
        self.sent = False
        self.bring_home()

    def bring_home(self) -> None:
        """Fetch all that are away."""
        for parameter in self._parameters:
            if isinstance(parameter.grad, AwayGradient):
                parameter.grad = parameter.grad.fetched()


class SendGradient:
    """An operator of a program: the gradient of a parameter leaves."""

    __name__ = __qualname__ = "SendGradient"

    def __init__(self, gradients: MovingGradients) -> None:
        self.gradients = gradients

    def __call__(self, gradient: torch.Tensor, parameter: torch.Tensor) -> None:
        self.begin(gradient, parameter)()

    def begin(self, gradient: torch.Tensor, parameter: torch.Tensor) -> Callable[[], None]:
        return self.gradients.send(parameter, gradient)


def begin_gradient(parameter: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Begin to fetch the gradient of ``parameter``, if it is away. Called, what is returned gives it."""
    gradient = parameter.grad
    return gradient.place.begin() if isinstance(gradient, AwayGradient) else lambda: gradient


def _there(fetched: Callable[[AwayGradient], torch.Tensor], arguments: Any) -> Any:
    return pytree.tree_map_only(AwayGradient, fetched, arguments)
