"""Threads and processes that a program starts inside a context.

A dispatch mode belongs to one thread. Another one could read an evicted tensor, so threads that are started from inside a
context run inside it too. A forked process (a data loader's worker) has its own copy of everything: it restores what it
reads, and evicts nothing any more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_start: Any = None


def install(inside: Callable[[], AbstractContextManager[Any] | None]) -> None:
    """Have threads run inside ``inside()``, called in the thread that starts them; ``None``: as they are."""
    global _start
    _start = threading.Thread.start

    @functools.wraps(_start)
    def start(thread: threading.Thread) -> None:
        context = inside()
        if context is not None:
            thread.run = _run_inside(thread.run, context)  # type: ignore[method-assign]
        _start(thread)

    threading.Thread.start = start  # type: ignore[method-assign, assignment]


def remove() -> None:
    threading.Thread.start = _start  # type: ignore[method-assign]


def _run_inside(run: Callable[[], None], context: AbstractContextManager[Any]) -> Callable[[], None]:
    @functools.wraps(run)
    def inside() -> None:
        with context:
            run()

    return inside
