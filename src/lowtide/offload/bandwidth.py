"""Measures the bandwidth of a second memory while operators run, at its first use, and caches it on disk.

Storages of two sizes go there and back while the device multiplies matrices; latency and bandwidth follow from the two
times. Figures are rounded to steps of a quarter, so that runs with similar measurements plan alike and find each
other's plans.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from lowtide.budget import parse_budget
from lowtide.device import interface_of
from lowtide.errors import PlanError
from lowtide.ir import Costs, SecondMemory
from lowtide.offload.interface import SecondMemoryOf
from lowtide.offload.registry import open_memory
from lowtide.store import Cache, cache_folder, content_key
from lowtide.units import format_bytes

FORMAT = "lowtide-second-memory/1"
_MOST_FILES = 32
_PATIENCE_SECONDS = 30.0
_LOG = logging.getLogger(__name__)
_SMALL, _LARGE = 256 << 10, 32 << 20  # bytes
_REPEATS = 5
_STEP = 1.25


def with_offload(costs: Costs, name: str | None, budget: int | str | None, device: torch.device) -> Costs:
    """``costs`` with the second memory ``name`` of a device; unchanged if ``name`` is ``None``. ``budget``: how much of
    the memory may be used; a percentage refers to all storages in ``costs``. Raises as ``open_memory``, and
    ``PlanError`` if the budget is more than is free."""
    if name is None:
        return costs
    memory, whole = open_memory(name, device), int(costs.storage_bytes.sum())
    free = memory.free_bytes()
    capacity = free if budget is None else parse_budget(budget, whole, what="offload_budget")
    if capacity > free:
        raise PlanError(
            f"an offload_budget of {capacity} bytes ({format_bytes(capacity)}) is more than is free: {format_bytes(free)}."
        )
    # Free bytes change all the time; cached plans are found only if their request is the same, so leave them out.
    known = capacity if budget is not None or capacity < whole else None
    found = _measured(name, device)
    rates = found.offload_bytes_per_second, found.fetch_bytes_per_second
    return replace(costs, second_memory=SecondMemory(*rates, found.latency_ns, known, memory.shared, name))


class Bandwidth(msgspec.Struct, frozen=True):
    """The measured bandwidth and latency of a second memory."""

    offload_bytes_per_second: Annotated[int, Meta(ge=1, le=1 << 50)]
    fetch_bytes_per_second: Annotated[int, Meta(ge=1, le=1 << 50)]
    latency_ns: Annotated[int, Meta(ge=0, le=1 << 40)]


@functools.cache
def _measured(name: str, device: torch.device) -> Bandwidth:
    """Return the cached measurement of this machine, or measure now."""
    memory = open_memory(name, device)
    key = f"second-memory-{content_key(interface_of(device).name(), name, *memory.identity())[:24]}"
    entries = Cache(cache_folder() / "second-memories", FORMAT, _MOST_FILES)
    decode = msgspec.json.Decoder(Bandwidth).decode
    make = functools.partial(_measure, name, memory, device)
    found: Bandwidth = entries.get_or_make(key, decode, make, lambda one: one, _PATIENCE_SECONDS)
    return found


def _measure(name: str, memory: SecondMemoryOf, device: torch.device) -> Bandwidth:
    small, large = (_round_trips(memory, device, size) for size in (_SMALL, _LARGE))
    rates = [(_LARGE - _SMALL) * 1e9 / max(slow - quick, 1) for slow, quick in zip(large, small, strict=True)]
    latency = max(statistics.mean(t - _SMALL * 1e9 / rate for t, rate in zip(small, rates, strict=True)), 1000.0)
    offload, fetch, latency = (_rounded(figure) for figure in (*rates, latency))
    _LOG.info("%s moves %s/s there and %s/s back", name, format_bytes(int(offload)), format_bytes(int(fetch)))
    return Bandwidth(int(offload), int(fetch), int(latency))


def _round_trips(memory: SecondMemoryOf, device: torch.device, nbytes: int) -> tuple[float, float]:
    """Return the median nanoseconds that ``nbytes`` take to the second memory, and back."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    there, back = [], []
    with _busy(device):
        lease = memory.lease(nbytes)
        for _ in range(_REPEATS):
            start = time.perf_counter_ns()
            copy = lease.offload(0, (tensor,))
            copy.settle()
            between = time.perf_counter_ns()
            copy.fetch()
            copy.settle()
            there.append(between - start)
            back.append(time.perf_counter_ns() - between)
    return statistics.median(there), statistics.median(back)


@contextlib.contextmanager
def _busy(device: torch.device) -> Iterator[None]:
    """Context in which a thread keeps the device multiplying matrices, if a thread can be started."""
    stop = threading.Event()

    def multiply() -> None:
        one = torch.ones(512, 512, device=device)
        with contextlib.nullcontext() if device.type == "cpu" else torch.Stream(device):
            while not stop.is_set():
                float((one @ one)[0, 0])  # waits for the product

    thread = threading.Thread(target=multiply, name="lowtide bandwidth", daemon=True)
    with contextlib.suppress(RuntimeError):
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()


def _rounded(figure: float) -> float:
    return float(_STEP ** round(math.log(max(figure, 1.0), _STEP)))
