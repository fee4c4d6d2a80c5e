"""Other attributes for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


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
def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, this thread calls what ``wrap`` makes of a function; all others call the function."""
    function, thread = getattr(owner, name), threading.get_ident()
    own = wrap(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (own if threading.get_ident() == thread else function)(*args, **kwargs)

    with replaced(owner, name, call):
        yield
