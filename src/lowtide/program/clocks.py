"""Readings of Python's clocks as results of operators, so that planned calls read them where eager does."""

from __future__ import annotations

import time

import torch
from torch import Tensor

NAMESPACE = "lowtide_clocks"
_SECONDS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
NAMES = (*_SECONDS, *(f"{name}_ns" for name in _SECONDS))  # the latter give whole numbers
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("ask(str name) -> Tensor")  # type: ignore[no-untyped-call]


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name.endswith("_ns") else torch.float64


def _ask(name: str) -> Tensor:
    return torch.tensor(getattr(time, name)(), dtype=_dtype(name))


_LIBRARY.impl("ask", _ask, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"{NAMESPACE}::ask", lambda name: torch.empty((), dtype=_dtype(name)), lib=_LIBRARY)
ASK = torch.ops.lowtide_clocks.ask.default
