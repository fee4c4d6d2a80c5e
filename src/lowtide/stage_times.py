"""Measure how long the stages between a model and its first planned step take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.progress import report

STAGES = ("capture", "kernels", "costs", "search", "lowering")

_listening: list[dict[str, float]] = []


@contextmanager
def stage(name: str) -> Iterator[None]:
    """A context whose time counts for the stage ``name``, one of ``STAGES``; stages do not nest."""
    began = time.perf_counter()
    report(name, 0.0)
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        for taken in _listening:
            taken[name] = taken.get(name, 0.0) + seconds


@contextmanager
def stage_seconds() -> Iterator[dict[str, float]]:
    """A context that collects seconds of wall time by stage, of all threads."""
    taken: dict[str, float] = {}
    _listening.append(taken)
    try:
        yield taken
    finally:
        _listening[:] = [each for each in _listening if each is not taken]


def itemised(taken: dict[str, float]) -> str:
    """``capture 1.2 s, costs 5.1 s, ...``, in the order of the stages."""
    return ", ".join(f"{name} {taken[name]:.1f} s" for name in STAGES if name in taken)
