"""Other attributes for a while."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

CAPTURING = threading.RLock()  # held by who replaces attributes to trace: they are replaced in the whole process
STANDS_FOR = "_lowtide_stands_for"  # attribute of a function or a class that is in another's place: that one


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``value``."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def all_wrapped(
    places: Iterable[tuple[Any, str]], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Inside, this thread calls what ``wrap`` makes of the function at each place, an owner and a name; all others call the
    function."""
    functions = [(owner, name, getattr(owner, name)) for owner, name in places]
    inherited = [(owner, name) for owner, name, _ in functions if isinstance(owner, type) and name not in vars(owner)]
    for owner, name, function in functions:
        setattr(owner, name, by_thread(wrap(function), function))
    try:
        yield
    finally:
        for owner, name, function in reversed(functions):
            if (owner, name) in inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, function)


def wrapped(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> contextlib.AbstractContextManager[None]:
    """The same for one place."""
    return all_wrapped([(owner, name)], wrap)


def telling(tell: Callable[[], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ``all_wrapped``: the function itself, each call of which is told first."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            tell()
            return function(*args, **kwargs)

        return told

    return wrap


def by_thread(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the first in this thread, and the second in all others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == thread else function)(*args, **kwargs)

    setattr(call, STANDS_FOR, function)
    return call


class InPlace(type):
    """Of a class that stands in the place of one of Python's, its ``original``, for a while: it is asked as that is."""

    original: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.original)

    def __subclasscheck__(cls, value: Any) -> bool:
        return value is cls or issubclass(value, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def stood_for(value: Any) -> Any:
    """What a function or a class is in the place of for a while; anything else as it is."""
    return vars(value).get(STANDS_FOR, value) if isinstance(value, (types.FunctionType, type)) else value


def replaced_methods() -> dict[int, Any]:
    """PyTorch's own methods of tensors, by the ids of the functions of others that stand in their place: a mode is told of a
    method by what stands under its name, so of such a function where that calls the method that it replaces."""
    return {
        id(value): getattr(torch._C.TensorBase, name)
        for name, value in vars(torch.Tensor).items()
        if hasattr(torch._C.TensorBase, name) and not str(getattr(value, "__module__", "torch")).startswith("torch")
    }


def below(function: Any, calling: types.FrameType) -> Any:
    """What a function of PyTorch's that has come to a mode goes on with, where ``calling`` is its call of the mode. It hands
    over what stands under its name; where that is a wrapper of the user's, which is running already, itself."""
    asking = calling.f_back
    if asking is None or calling.f_code is not torch.overrides.handle_torch_function.__code__:
        return function
    code: Any = getattr(function, "__code__", asking.f_code)
    ours = code is asking.f_code or code.co_filename.startswith(
        (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    )
    if ours or asking.f_code.co_freevars:
        return function
    variables = dict(asking.f_globals)  # in which it stands under its name, for other modes
    itself = types.FunctionType(asking.f_code, variables)
    variables[asking.f_code.co_name] = itself
    return itself
