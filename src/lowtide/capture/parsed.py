"""PyTorch functions whose parsers accept only whole numbers, and refuse stand-ins before any mode sees the call.

``roll`` takes a number that changes from call to call as other operators do, if the number does not decide the layout
of the result. (For channels-last tensors it does: eager's result has that order unless it is rolled by zero.)
``narrow`` and ``select`` are other ways to index a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from lowtide.capture.positions import is_place
from lowtide.capture.python_state.code.beside import Code, places_of
from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.capture.taken_numbers import BUILT_IN, followed_by_math
from lowtide.capture.trace.classes import TRACED
from lowtide.capture.trace.known_values import unknown
from lowtide.capture.trace.patches import all_wrapped
from lowtide.program.layouts import contiguous_strides
from lowtide.program.references import map_leaves

_CHANNELS_LAST = (4, 5)  # numbers of dimensions for which that order exists


@contextlib.contextmanager
def followed_by_functions(code: Code) -> Iterator[None]:
    """A context in which functions of ``math``, and the ones described above, take stand-ins, wherever the model's
    ``code`` refers to them."""
    with followed_by_math(code), contextlib.ExitStack() as stack:
        for name, own in _OWN.items():
            functions = places_of([(torch, [name])], code[1])
            stack.enter_context(all_wrapped([*functions, *((kind, name) for kind in TRACED)], _taking(own)))
        yield


def _taking(own: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        if not isinstance(function, BUILT_IN):  # the user's own function
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            stands = any(map(_stands, (*args, *kwargs.values())))
            return own(function, *args, **kwargs) if stands else function(*args, **kwargs)

        return call

    return wrap


def _stands(one: Any) -> bool:
    """Whether the value is or contains a stand-in, or is a traced tensor that is a position in another one."""
    if type(one) in (list, tuple):
        return any(type(each) is StandIn for each in one)
    return type(one) is StandIn or (isinstance(one, TRACED) and is_place(one))


def _roll(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    tensor = args[0] if args else kwargs["input"]
    if tensor.dim() in _CHANNELS_LAST and (
        tensor.requires_grad or not _is_in_order(tensor)
    ):  # the gradient may have that order too
        map_leaves((args, kwargs), StandIn, _refuse)
    with unknown():
        args, kwargs = map_leaves((args, kwargs), StandIn, lambda one: one.taken(()))
        return function(*args, **kwargs)


def _is_in_order(tensor: Tensor) -> bool:
    return tensor.stride() == contiguous_strides(tensor.shape)


def _refuse(one: StandIn) -> NoReturn:
    raise one.misused()


def _narrow(_: Any, input: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    return input[(*_before(input, dim), slice(start, start + length))]


def _select(_: Any, input: Tensor, dim: int, index: Any) -> Tensor:
    return input[(*_before(input, dim), index)]


def _before(tensor: Tensor, dim: int) -> list[slice]:
    return [slice(None)] * (dim % tensor.dim())


_OWN: dict[str, Callable[..., Tensor]] = {"roll": _roll, "narrow": _narrow, "select": _select}
