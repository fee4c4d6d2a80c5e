"""Running operators within the limit.

The CPU's allocator itself asks for room. Those of accelerators cannot, so room is made before an operator starts. The first
calls of a signature (the operator, and the geometry of what it is given) are observed: their peak and, the device's queue
empty before and after, their time. Later ones are believed to take the same. At first sight an operator is believed to take
its results, whose shapes PyTorch computes without running it, and the largest scratch observed for it so far; where it
takes more, the limit is exceeded that once, and met again at once.
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

_OBSERVED = 3  # first calls of a signature that are observed, and then
_AGAIN_EVERY = 100  # one in so many
_MOST_KNOWN = 1 << 15  # signatures
# Arguments whose value can decide what an operator takes; objects, such as the profiler's, may not even be comparable.
_VALUES = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device, torch.memory_format)


def executor_for(memory: Memory, device: torch.device, observed: Observed) -> Executor:
    """What runs operators within the limit of the device's memory."""
    if isinstance(memory.meter, AllocationCounter):
        return Executor(memory)
    return PredictingExecutor(memory, device, observed)


class Executor:
    """Runs operators once everything that they read is in place, in one thread at a time.

    On the CPU the counter under PyTorch's allocator asks for room at the very allocation that would exceed the limit: the
    outputs and the scratch of an operator alike, to the byte, known before or not.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.counter = memory.meter if isinstance(memory.meter, AllocationCounter) else None
        self.thread = 0

    def hold(self, limit_bytes: int | None) -> None:
        """Keep the allocator's level at or below the limit from now on; ``None``: no limit."""
        self.memory.limit_bytes = limit_bytes
        if self.counter is not None:
            self.counter.limit(limit_bytes, None if limit_bytes is None else self._make_room)

    def enter_thread(self) -> None:
        """The calling thread is the one that the limit speaks to."""
        self.thread = threading.get_ident()
        if self.counter is not None:
            self.counter.limited_thread = self.thread

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """What the operator returns, and the nanoseconds that it took without the evictions that it asked for."""
        counters = self.memory.counters
        evict_ns = counters.evict_ns
        began = statistics.now_ns()
        result = operator.run(*args, **kwargs)
        return result, statistics.now_ns() - began - (counters.evict_ns - evict_ns)

    def _make_room(self, wanted_bytes: int) -> bool:
        try:
            with self.memory.lock:
                return self.memory.make_room(wanted_bytes)
        except BaseException as error:  # noqa: BLE001 (C++ cannot carry it; whoever ran the operator raises it again)
            self.memory.interruption = error
            return False


@dataclass(slots=True)
class _Prediction:
    """What is believed of a signature: bytes at most above the level at the start, of these the results', and time."""

    bytes: int
    results_bytes: int
    calls: int = 0
    cost_ns: int = 0


@dataclass(slots=True, eq=False)
class Observed:
    """What was observed of calls by their signature, and the most scratch of an operator, for all entries into one context: to
    observe anew takes the device's queue empty."""

    predictions: dict[Hashable, _Prediction] = field(default_factory=dict)
    scratch_bytes: dict[Any, int] = field(default_factory=dict)


class PredictingExecutor(Executor):
    """Makes room operator by operator, from what was ``observed`` of earlier calls."""

    def __init__(self, memory: Memory, device: torch.device, observed: Observed) -> None:
        super().__init__(memory)
        self.counter = None
        self.device = device
        self.observed = observed

    def run(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the operator in room made for it."""
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
        """Wait until the device has nothing left to do."""
        interface_of(self.device).synchronize()

    def _make_what_can_be(self, wanted_bytes: int) -> None:
        """Make room as far as that can be; what is missing is no failure."""
        refusal = self.memory.refusal
        self.memory.make_room(wanted_bytes)
        self.memory.refusal = refusal


def _geometry(value: Any) -> Hashable:
    """What of an argument decides how much memory an operator takes and how long."""
    if isinstance(value, Tensor):
        strided = value.layout is torch.strided
        return value.size(), value.stride() if strided else value.layout, value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_geometry, value))
    if isinstance(value, dict):
        return tuple((name, _geometry(item)) for name, item in value.items())
    return type(value), value if isinstance(value, _VALUES) else None


def _result_bytes(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> int:
    """The storages that the operator will return, from a run on tensors without memory; 0 where that cannot be."""
    try:
        blank_args, blank_kwargs = mapped(_blank, args), {name: mapped(_blank, item) for name, item in kwargs.items()}
        if kwargs.get("device") is not None:
            blank_kwargs["device"] = "meta"
        if kwargs.get("generator") is not None:
            blank_kwargs["generator"] = None  # it is not of that device
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
