"""Run compiled kernels in parallel, one thread per core: they release the interpreter's lock. Results come in the order of the
arguments, so they do not depend on the number of cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_threads(run: Callable[[Asked], Answer], asked: Iterable[Asked], *, brief: bool = False) -> list[Answer]:
    """Run ``run`` for every item of ``asked`` in threads. ``brief``: all runs together take less time than it takes to start
    threads on busy cores, so they run in this thread. So do runs for which no threads can be started, for lack of memory or
    because of a limit on their number."""
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
