"""Runs operators within the memory limit.

The CPU's allocator itself asks for room. Those of accelerators cannot, so room is made before an operator starts. The first
calls of a signature (the operator and the geometry of its arguments) are measured: their peak and, with the device
synchronized before and after, their time. Later calls are assumed to take the same. A signature's first call is assumed to
take its results' bytes, from their shapes on the meta device, plus the operator's largest scratch seen so far; if it takes
more, the limit is exceeded that once, and restored right after.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.device import interface_of
from lowtide.dynamic import statistics
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import blank, mapped, storage_of, tensors_of
from lowtide.dynamic.operators import Operator
from lowtide.memory.allocators import PeakWindow, round_up
from lowtide.memory.cpu_allocator import AllocationCounter

_OBSERVED = 3  # number of first calls of a signature that are measured, and then
_AGAIN_EVERY = 100  # one in so many
_MOST_KNOWN = 1 << 15  # signatures
# Types of arguments whose value can affect memory and time; objects, such as the profiler's, may not even be comparable.
_VALUES = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device, torch.memory_format)


def executor_for(memory: Memory, device: torch.device, observed: Observed) -> Executor:
    """Return the executor for the device: exact on the CPU, predicting on accelerators."""
    if isinstance(memory.meter, AllocationCounter):
        return Executor(memory)
    return PredictingExecutor(memory, device, observed)


class Executor:
    """Runs operators whose inputs are resident, in one thread at a time.

    On the CPU the counter under PyTorch's allocator asks for room at the very allocation that would exceed the limit: the
    outputs and scratch of an operator alike, to the byte, whether predicted or not.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.counter = memory.meter if isinstance(memory.meter, AllocationCounter) else None
        self.thread = 0

    def hold(self, limit_bytes: int | None) -> None:
        """Set the limit under which the allocator's level is held from now on; ``None``: no limit."""
        self.memory.limit_bytes = limit_bytes
        if self.counter is not None:
            self.counter.limit(limit_bytes, None if limit_bytes is None else self._make_room)

    def enter_thread(self) -> None:
        """Apply the limit to allocations of the calling thread."""
        self.thread = threading.get_ident()
        if self.counter is not None:
            self.counter.limited_thread = self.thread

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the operator. Returns its result and its time in ns, without that of evictions made for it."""
        counters = self.memory.counters
        evict_ns = counters.evict_ns
        began = statistics.now_ns()
        result = operator.run(*args, **kwargs)
        return result, statistics.now_ns() - began - (counters.evict_ns - evict_ns)

    def _make_room(self, wanted_bytes: int) -> bool:
        try:
            with self.memory.lock:
                return self.memory.make_room(wanted_bytes)
        except BaseException as error:  # noqa: BLE001 (C++ cannot propagate it; the caller of the operator raises it again)
            self.memory.interruption = error
            return False


@dataclass(slots=True)
class _Prediction:
    """Predicted cost of a signature: peak bytes above the level at its start, bytes of results among them, and time."""

    bytes: int
    results_bytes: int
    calls: int = 0
    cost_ns: int = 0


@dataclass(slots=True, eq=False)
class Observed:
    """Measured costs by signature, and the largest scratch by operator. Shared by all entries into one context, since
    measuring again would synchronize the device."""

    predictions: dict[Hashable, _Prediction] = field(default_factory=dict)
    scratch_bytes: dict[Any, int] = field(default_factory=dict)


class PredictingExecutor(Executor):
    """Makes room before each operator, from the costs ``observed`` in earlier calls."""

    def __init__(self, memory: Memory, device: torch.device, observed: Observed) -> None:
        super().__init__(memory)
        self.counter = None
        self.device = device
        self.observed = observed

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Make room for the operator's predicted bytes, and run it."""
        signature = (operator.run, _geometry(args), _geometry(kwargs))
        known = self.observed.predictions
        expected = known.get(signature)
        if expected is None:
            results_bytes = _result_bytes(operator, args, kwargs, self.device)
            if len(known) >= _MOST_KNOWN:
                known.clear()
            expected = known[signature] = _Prediction(results_bytes, results_bytes)
            self._make_what_can_be(expected.bytes + self.observed.scratch_bytes.get(operator.run, 0))
        if not self.memory.make_room(expected.bytes):
            raise torch.OutOfMemoryError(f"{operator.name}: can't allocate memory within the budget")
        if expected.calls < _OBSERVED or expected.calls % _AGAIN_EVERY == 0:
            result = self._observed(expected, operator, args, kwargs)
        else:
            result = operator.run(*args, **kwargs)
        expected.calls += 1
        return result, expected.cost_ns

    def _observed(self, expected: _Prediction, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with PeakWindow(self.memory.meter) as window:
            self._finish()
            began = statistics.now_ns()
            result = operator.run(*args, **kwargs)
            self._finish()
            cost_ns = statistics.now_ns() - began
            taken_bytes = window.peak_bytes
        first = expected.calls == 0
        expected.bytes = taken_bytes if first else max(expected.bytes, taken_bytes)
        expected.cost_ns = cost_ns if first else min(expected.cost_ns, cost_ns)
        scratch_bytes = self.observed.scratch_bytes.get(operator.run, 0)
        self.observed.scratch_bytes[operator.run] = max(scratch_bytes, taken_bytes - expected.results_bytes)
        self._make_what_can_be(0)
        return result

    def _finish(self) -> None:
        """Synchronize the device."""
        interface_of(self.device).synchronize()

    def _make_what_can_be(self, wanted_bytes: int) -> None:
        """Make as much of the room as possible; record no refusal if some is missing."""
        refusal = self.memory.refusal
        self.memory.make_room(wanted_bytes)
        self.memory.refusal = refusal


def _geometry(value: Any) -> Hashable:
    """Return the part of an argument that determines an operator's memory and time."""
    if isinstance(value, Tensor):
        strided = value.layout is torch.strided
        return value.size(), value.stride() if strided else value.layout, value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_geometry, value))
    if isinstance(value, dict):
        return tuple((name, _geometry(item)) for name, item in value.items())
    return type(value), value if isinstance(value, _VALUES) else None


def _result_bytes(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> int:
    """Return the bytes of the operator's new result storages, from a run on meta tensors; 0 if that fails."""
    try:
        blank_args, blank_kwargs = mapped(_blank, args), {name: mapped(_blank, item) for name, item in kwargs.items()}
        if kwargs.get("device") is not None:
            blank_kwargs["device"] = "meta"
        if kwargs.get("generator") is not None:
            blank_kwargs["generator"] = None  # a generator of the real device does not fit
        result = operator.run(*blank_args, **blank_kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0
    given = {storage_of(tensor)._cdata for tensor in tensors_of([blank_args, *blank_kwargs.values()])}
    made = {storage_of(tensor)._cdata: storage_of(tensor).nbytes() for tensor in tensors_of(result)}
    return sum(round_up(nbytes, device) for address, nbytes in made.items() if address not in given)


def _blank(value: Any) -> Any:
    if isinstance(value, Tensor):
        return blank(value)
    return None if isinstance(value, torch.Generator) else value
