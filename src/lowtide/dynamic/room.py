"""Making room before memory is taken.

On the CPU the counter under PyTorch's allocator asks for room at the very allocation that would exceed the limit: the
outputs and the scratch of an operator alike, to the byte, known before or not (``AllocatorRoom``). Elsewhere room for the
whole operator is made before it starts, from what was observed for its signature, or at first sight from the shapes that
it will return (``SignatureRoom``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.dynamic.engine import Engine
from lowtide.dynamic.node import Geometry, storage_of, tensors_of
from lowtide.dynamic.operators import Operator
from lowtide.errors import ExecutionError, PlanError
from lowtide.memory import cpu_allocator
from lowtide.memory.allocators import round_up
from lowtide.memory.cpu_allocator import AllocationCounter

_OBSERVED = 3  # first calls of a signature that are observed, and then
_AGAIN_EVERY = 100  # one in so many


class Refusal:
    """An allocation that could not be granted: what was asked for, what was in use, and by how much both are too much."""

    def __init__(self, wanted_bytes: int, used_bytes: int, limit_bytes: int) -> None:
        self.wanted_bytes = wanted_bytes
        self.used_bytes = used_bytes
        self.missing_bytes = used_bytes + wanted_bytes - limit_bytes


class Meter(Protocol):
    """Level and peak of a device's allocator. ``reset_peak`` lowers the peak to the level, and returns it."""

    @property
    def level_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> int: ...

    def raise_peak(self, peak_bytes: int) -> None: ...


class Room:
    """A limit on the level of an allocator, and what happens where it would be exceeded."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self.engine = engine
        self.meter = meter
        self.limit_bytes: int | None = None
        self.refusal: Refusal | None = None
        self.interruption: BaseException | None = None
        self.thread = 0
        engine.memory.free_bytes = self.free_bytes
        engine.memory.refused_bytes = self.refused_bytes

    def free_bytes(self) -> int:
        """How far the level is below the limit."""
        return sys.maxsize if self.limit_bytes is None else self.limit_bytes - self.meter.level_bytes

    def hold(self, limit_bytes: int | None) -> None:
        """Keep the allocator's level at or below the limit from now on; ``None``: no limit."""
        self.limit_bytes = limit_bytes

    def enter_thread(self) -> None:
        """The calling thread is the one that the limit speaks to."""
        self.thread = threading.get_ident()

    def make(self, wanted_bytes: int) -> bool:
        """Evict until so many bytes can be allocated; false where that cannot be."""
        limit, meter = self.limit_bytes, self.meter
        while limit is not None and meter.level_bytes + wanted_bytes > limit:
            if not self.engine.memory.evict_one():
                self.refusal = Refusal(wanted_bytes, meter.level_bytes, limit)
                return False
        return True

    def failure(self) -> tuple[BaseException | None, Refusal | None]:
        """What happened since the last call where room was to be made, if anything."""
        seen = self.interruption, self.refusal
        self.interruption = self.refusal = None
        return seen

    def refused_bytes(self) -> int:
        """By how much the last allocation that was refused exceeded the limit, 0 without one; raises what interrupted it."""
        interruption, refusal = self.failure()
        if interruption is not None:
            raise interruption from None
        return 0 if refusal is None else refusal.missing_bytes


class AllocatorRoom(Room):
    """The limit on the level of the CPU allocator, for the threads that run operators under the engine, one at a time."""

    def __init__(self, engine: Engine, counter: AllocationCounter) -> None:
        super().__init__(engine, counter)
        self.counter = counter

    def hold(self, limit_bytes: int | None) -> None:
        super().hold(limit_bytes)
        self.counter.limit(limit_bytes, None if limit_bytes is None else self._make)

    def enter_thread(self) -> None:
        super().enter_thread()
        self.counter.limited_thread = self.thread

    def _make(self, wanted_bytes: int) -> bool:
        try:
            with self.engine.lock:
                return self.make(wanted_bytes)
        except BaseException as error:  # noqa: BLE001 (C++ cannot carry it; whoever ran the operator raises it again)
            self.interruption = error
            return False


class SignatureRoom(Room):
    """Room made operator by operator, where the allocator cannot ask for it.

    The first calls of a signature (the operator, and the geometry of what it is given) are observed: their peak and, the
    device's queue empty before and after, their time. Later ones are believed to take the same. At first sight an operator
    is believed to take its results, whose shapes PyTorch computes without running it, and the largest scratch observed for
    it so far; where it takes more, the limit is exceeded that once, and met again at once.
    """

    def __init__(self, engine: Engine, meter: Meter) -> None:
        super().__init__(engine, meter)
        self.seen: dict[Any, _Seen] = {}
        self.scratch_bytes: dict[Operator, int] = {}
        engine.execute = self.execute

    def execute(self, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the operator in room made for it."""
        signature = (operator, _key(args), _key(kwargs))
        seen = self.seen.get(signature)
        if seen is None:
            seen = self.seen[signature] = _Seen(_result_bytes(operator, args, kwargs, self.engine.device))
            self._try_to_make(seen.bytes + self.scratch_bytes.get(operator, 0))
        if not self.make(seen.bytes):
            raise torch.OutOfMemoryError(f"{operator.name}: can't allocate memory within the budget")
        if seen.calls < _OBSERVED or seen.calls % _AGAIN_EVERY == 0:
            result = self._observed(seen, operator, args, kwargs)
        else:
            result = operator.run(*args, **kwargs)
        seen.calls += 1
        return result, seen.cost_ns

    def _observed(self, seen: _Seen, operator: Operator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        meter = self.meter
        before, level_bytes = meter.peak_bytes, meter.reset_peak()
        try:
            self._finish()
            result, cost_ns = self.engine.timed(self._finished(operator), args, kwargs)
            taken_bytes = meter.peak_bytes - level_bytes
        finally:
            meter.raise_peak(before)
        seen.bytes = taken_bytes if seen.calls == 0 else max(seen.bytes, taken_bytes)
        seen.cost_ns = cost_ns if seen.calls == 0 else min(seen.cost_ns, cost_ns)
        scratch_bytes = self.scratch_bytes.get(operator, 0)
        self.scratch_bytes[operator] = max(scratch_bytes, taken_bytes - seen.results_bytes)
        self._try_to_make(0)
        return result

    def _finished(self, operator: Operator) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            result = operator.run(*args, **kwargs)
            self._finish()
            return result

        return run

    def _finish(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)

    def _try_to_make(self, bytes: int) -> None:
        """As far as that can be."""
        refusal = self.refusal
        self.make(bytes)
        self.refusal = refusal


class _Seen:
    """What is believed of a signature: bytes at most above the level at the start, of these the results', and time."""

    __slots__ = ("bytes", "calls", "cost_ns", "results_bytes")

    def __init__(self, results_bytes: int) -> None:
        self.bytes = self.results_bytes = results_bytes
        self.calls = 0
        self.cost_ns = 0


class CudaMeter:
    """Of the caching allocator: bytes handed out, not those reserved.

    Its own peak falls whenever an operator is observed, so ``torch.cuda.max_memory_allocated`` tells less than the truth
    afterwards; ``peak_bytes`` does not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._raised = 0

    @property
    def level_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        return max(self._raised, torch.cuda.max_memory_allocated(self.device))

    def reset_peak(self) -> int:
        self._raised = 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.level_bytes

    def raise_peak(self, peak_bytes: int) -> None:
        self._raised = max(self._raised, peak_bytes)


def device_of_budget(device: torch.device | str | None) -> torch.device:
    """The CPU or one CUDA device; by default the current CUDA device once the program uses CUDA. ``PlanError`` otherwise."""
    if device is None:
        device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise PlanError(f"device={device!r} is no device: {error}") from None
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f"the online mode holds budgets of CPU and CUDA memory, not of {device.type!r}.")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise PlanError(f"device={str(device)!r}, but PyTorch finds no CUDA device here.")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def room_of(engine: Engine) -> Room:
    """The room of the engine's device."""
    if engine.device.type == "cuda":
        return SignatureRoom(engine, CudaMeter(engine.device))
    counter = cpu_allocator.install()
    if counter is None:
        raise ExecutionError(
            "the online mode needs the exact CPU allocation counter, which this build of PyTorch prevents."
        )
    return AllocatorRoom(engine, counter)


def _key(value: Any) -> Any:
    """What of an argument decides how much memory an operator takes and how long."""
    if isinstance(value, Tensor):
        return (
            value.size(),
            value.stride() if value.layout is torch.strided else value.layout,
            value.dtype,
            value.device,
        )
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return type(value), value if isinstance(value, Hashable) else repr(value)


def _result_bytes(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], device: torch.device) -> int:
    """The storages that the operator will return, from a run on tensors without memory; 0 where that cannot be."""
    try:
        blank_args, blank_kwargs = _blank(args), _blank(kwargs)
        if kwargs.get("device") is not None:
            blank_kwargs["device"] = "meta"
        result = operator.run(*blank_args, **blank_kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return 0
    given = {storage_of(tensor)._cdata for tensor in tensors_of([blank_args, *blank_kwargs.values()])}
    made = {storage_of(tensor)._cdata: storage_of(tensor).nbytes() for tensor in tensors_of(result)}
    return sum(round_up(nbytes, device) for address, nbytes in made.items() if address not in given)


def _blank(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Geometry(value).blank()
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, (list, tuple)):
        return [_blank(item) for item in value]
    if isinstance(value, dict):
        return {name: _blank(item) for name, item in value.items()}
    return value
