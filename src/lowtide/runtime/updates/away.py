"""Tensors that lie in a second memory, states of an optimizer and gradients, as seen by code outside planned passes.

Code that reads one fetches it for that operator. Code that writes to one has it fetched, written and stored again. So
clipping gradients by their total norm holds only one of them at a time. A view shares memory with its tensor, so a
tensor with views stays in memory until ``Place.leave``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils import _pytree as pytree

from lowtide.offload import Copy, Lease


class Place:
    """Where a tensor is: at ``offset`` of its room in the second memory, or in memory as ``here``."""

    def __init__(self, lease: Lease, offset: int, tensor: torch.Tensor) -> None:
        self._lease, self._offset = lease, offset
        self.copy: Copy = lease.offload(offset, (tensor,))
        self.here: torch.Tensor | None = None

    def begin(self) -> Callable[[], torch.Tensor]:
        """Begin to fetch the tensor. Returns a function that waits for it and raises ``ExecutionError`` if it cannot be
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

    def take(self, tensor: torch.Tensor) -> None:
        """Store the tensor, which was fetched and has other values now."""
        if self.here is None:
            self.here = tensor  # stays here if it cannot be stored
            self.leave()

    def leave(self) -> None:
        """Store the tensor if it is in memory."""
        if self.here is not None:
            self.copy = self._lease.offload(self._offset, (self.here,))
            self.copy.left()
            self.here = None


class AwayTensor(torch.Tensor):
    """Has the shape and type of a tensor, and the ``place`` of its elements. ``detach`` keeps the place."""

    place: Place
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, place: Place) -> Self:
        kind: dict[str, Any] = {"strides": tensor.stride(), "dtype": tensor.dtype, "device": tensor.device}
        made: Self = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, **kind)
        made.place = place
        return made

    def fetched(self) -> torch.Tensor:
        """The tensor itself. Raises ``ExecutionError`` if it cannot be read."""
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
        away: dict[int, AwayTensor] = {}

        def fetched(one: AwayTensor) -> torch.Tensor:
            if id(one.place) not in there:
                there[id(one.place)] = one.fetched()
            away[id(there[id(one.place)])] = one
            return there[id(one.place)]

        def places(writes: bool) -> list[Place]:
            leaves = pytree.tree_leaves([value for alias, value in shared if alias.is_write == writes])
            return [one.place for one in leaves if isinstance(one, AwayTensor)]

        result = func(*_there(fetched, args), **_there(fetched, given))
        for place in places(writes=False):  # the result is a view, which may be written to
            place.here = there[id(place)]
        for place in places(writes=True):
            place.take(there[id(place)])
        return away.get(id(result), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.fetched().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetched().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"AwayTensor(shape={list(self.shape)}, dtype={self.dtype})"


class Transfer:
    """An operator of a program. It calls ``begin`` and waits for what that returns."""

    def __init__(self, name: str, begin: Callable[..., Callable[[], Any]]) -> None:
        self.begin = begin
        self.__name__ = self.__qualname__ = name
        self.__module__ = "lowtide"

    def __call__(self, *given: Any) -> Any:
        return self.begin(*given)()


def _there(fetched: Callable[[AwayTensor], torch.Tensor], arguments: Any) -> Any:
    return pytree.tree_map_only(AwayTensor, fetched, arguments)
