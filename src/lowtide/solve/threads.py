"""As many runs at a time as there are cores: kernels hold no lock of the interpreter. Results come in the order of what was
asked, so that they do not depend on how many that are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def available_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(run: Callable[[Asked], Answer], asked: Iterable[Asked], *, brief: bool = False) -> list[Answer]:
    """``brief``: together they take less than threads take to start where the cores are busy, so they run in this one. So do
    those for which no threads can be started, for want of memory or of a limit on their number."""
    asked = list(asked)
    if not brief:
        with ThreadPoolExecutor(available_cores()) as pool:
            try:
                begun = [pool.submit(run, one) for one in asked]
            except RuntimeError:
                pool.shutdown(cancel_futures=True)
            else:
                return [one.result() for one in begun]
    return list(map(run, asked))
