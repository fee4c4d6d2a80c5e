"""Replace attributes for the duration of a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

CAPTURING = threading.RLock()  # held while tracing, which replaces attributes in the whole process
STANDS_FOR = "_lowtide_stands_for"  # attribute of a replacement: what it replaces


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
    """Inside, this thread calls ``wrap(function)`` for the function at each place, a pair of owner and name. Other
    threads call the function itself."""
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
    """``all_wrapped`` for one place."""
    return all_wrapped([(owner, name)], wrap)


def telling(tell: Callable[[], object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """An argument for ``all_wrapped``: call ``tell`` before each call of the function."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            tell()
            return function(*args, **kwargs)

        return told

    return wrap


def by_thread(own: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``own`` in this thread and ``function`` in all others."""
    thread = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == thread else function)(*args, **kwargs)

    setattr(call, STANDS_FOR, function)
    return call


class InPlace(type):
    """Metaclass of a class that replaces a built-in class, its ``original``, for a while. Instance and subclass checks
    and attributes are those of the original."""

    original: type

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.original)

    def __subclasscheck__(cls, value: Any) -> bool:
        return value is cls or issubclass(value, cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


def stood_for(value: Any) -> Any:
    """The function or class that ``value`` replaces for a while; ``value`` itself if it replaces none."""
    return vars(value).get(STANDS_FOR, value) if isinstance(value, (types.FunctionType, type)) else value


def replaced_methods() -> dict[int, Any]:
    """PyTorch's own methods of tensors, by the ids of the user's functions that replace them. A mode is called with
    whatever is the class's attribute of that name. If the user's replacement calls the original, the mode is thus
    called with the replacement."""
    return {
        id(value): getattr(torch._C.TensorBase, name)
        for name, value in vars(torch.Tensor).items()
        if hasattr(torch._C.TensorBase, name) and not str(getattr(value, "__module__", "torch")).startswith("torch")
    }


def below(function: Any, calling: types.FrameType) -> Any:
    """The function that a mode goes on with when it is called with ``function``; ``calling`` is the frame that called
    the mode. PyTorch passes the attribute of that name. If this is a wrapper of the user's, which is already
    running, the result is the wrapped function of PyTorch's itself."""
    asking = calling.f_back
    if asking is None or calling.f_code is not torch.overrides.handle_torch_function.__code__:
        return function
    code: Any = getattr(function, "__code__", asking.f_code)
    ours = code is asking.f_code or code.co_filename.startswith(
        (os.path.dirname(torch.__file__), os.path.dirname(__file__))
    )
    if ours or asking.f_code.co_freevars:
        return function
    variables = dict(asking.f_globals)  # in which other modes find it by its name
    itself = types.FunctionType(asking.f_code, variables)
    variables[asking.f_code.co_name] = itself
    return itself
