"""The run that all active contexts of the process share, and the session of each.

There is one CPU allocator and so one engine: the outermost context makes it, and it ends with the last one that is left,
whichever threads they are entered in.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.dynamic.engine import Engine
from lowtide.dynamic.executor import AllocatorExecutor, Executor
from lowtide.dynamic.limit import Limit, Refusal
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.mode import Depth, OnlineMode
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.patches import Access, Patches, uncompiled
from lowtide.dynamic.prediction import PredictingExecutor
from lowtide.dynamic.rebuild import RebuildError
from lowtide.dynamic.recording import Recorder
from lowtide.dynamic.statistics import OnlineStatistics
from lowtide.errors import ExecutionError, OnlineBudgetError, PlanError
from lowtide.eviction import Pool
from lowtide.memory.allocators import PeakWindow, meter_of
from lowtide.memory.cpu_allocator import AllocationCounter
from lowtide.program.source import user_source
from lowtide.trace import TraceWriter
from lowtide.units import format_bytes

_WARN_FROM_NS = 1_000_000_000  # a second of recomputation
_EXTENSIONS = 30  # of the limit at the end, at most, each by what was found to be missing
_TINY = 1_000_000  # results of less than a millionth of the budget are kept

_LOCK = threading.RLock()
_run: OnlineRun | None = None


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of ``lowtide.online``, checked."""

    budget_bytes: int
    heuristic: str
    policy: str
    sample: bool
    record: str | Path | None
    seed: int
    warn_above: float
    device: torch.device


def enter(settings: Settings) -> Session:
    """A session of the run in progress, or else of a new one with these settings."""
    global _run
    with _LOCK:
        if _run is None:
            _run = OnlineRun(settings)
        elif settings.device != _run.device:
            raise PlanError(
                f"a context for {_run.device} is active, and one for {settings.device} cannot be entered inside it."
            )
        with _run.memory.lock:
            return Session(settings.budget_bytes, _run)


def is_inside() -> bool:
    """Whether this thread is inside a context."""
    return _run is not None and _run.depth.modes > 0


def executor_for(memory: Memory, device: torch.device) -> Executor:
    """What runs operators within the limit of the device's memory."""
    meter = memory.limit.meter
    return (
        AllocatorExecutor(memory, meter) if isinstance(meter, AllocationCounter) else PredictingExecutor(memory, device)
    )


class OnlineRun:
    """What all active contexts of the process share: the engine, the limit it works within, and the process-wide patches."""

    def __init__(self, settings: Settings) -> None:
        self.device = settings.device
        meter = meter_of(self.device)
        if meter is None:
            raise ExecutionError(
                "the online mode needs the exact CPU allocation counter, which this build of PyTorch prevents."
            )
        sample, policy, record = settings.sample, settings.policy, settings.record
        pool = Pool(heuristic=settings.heuristic, sample=sample, skip_small=sample, seed=settings.seed)
        self.limit = Limit(meter)
        self.memory = Memory(pool, self.limit, banish=policy == "banish", ignore=policy == "ignore")
        self.executor = executor_for(self.memory, self.device)
        tiny_bytes = settings.budget_bytes // _TINY
        self.engine = Engine(self.memory, self.executor, device=self.device, tiny_bytes=tiny_bytes)
        if record is not None:
            name, device = Path(record).stem, self.device.type
            writer = TraceWriter(record, name=name, device=device, budget_bytes=settings.budget_bytes)
            self.memory.recorder = Recorder(writer)
        self.sessions: list[Session] = []
        self.depth = Depth()
        self.open = True
        self.warn_above = settings.warn_above
        self.warn_at_ns: float = _WARN_FROM_NS
        self.patches = Patches(self.materialize, self.inside)

    def mode(self) -> OnlineMode:
        return OnlineMode(self.call, self.detached, self.depth)

    def inside(self) -> OnlineMode | None:
        """For a thread that the calling one starts."""
        return self.mode() if self.depth.modes else None

    @uncompiled
    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the program."""
        with self.memory.lock:
            if not self.open:  # a thread that outlived the context
                return operator.run(*args, **kwargs)
            if self.executor.thread != threading.get_ident():
                self.executor.enter_thread()
            outermost = self.engine.idle
            try:
                result = self.engine.run(operator, args, kwargs)
                if self.memory.counters.rematerialize_ns > self.warn_at_ns:
                    self._warn()
                return result
            except BaseException as error:
                self._failed(error, operator.name, outermost=outermost)
                raise

    @uncompiled
    def detached(self, tensor: torch.Tensor) -> None:
        """By a view, which passes the engine by."""
        with self.memory.lock:
            if self.open:
                self.engine.detached(tensor)

    @uncompiled
    def materialize(self, tensor: torch.Tensor, access: Access) -> Callable[[], None] | None:
        """Have the tensor's bytes there for whoever reads them from outside the dispatcher."""
        with self.memory.lock, _disable_current_modes(), torch.no_grad():
            if not self.open:
                return None
            self.executor.enter_thread()
            outermost = self.engine.idle
            try:
                return self.engine.materialize(tensor, access)
            except BaseException as error:
                self._failed(error, "reading a tensor", outermost=outermost)
                raise

    def _warn(self) -> None:
        """Say once that the program mostly recomputes."""
        counters = self.memory.counters
        if counters.rematerialize_ns > self.warn_above * counters.operator_ns:
            self.warn_at_ns = sys.maxsize
            warnings.warn(
                f"the online mode has spent {counters.rematerialize_ns / 1e9:.1f} s on recomputing for "
                f"{counters.operator_ns / 1e9:.1f} s of the program's own operators: the budget is too small for this program "
                "to run well in; take a larger one, a smaller batch, or plan ahead with lowtide.rematerialize where the model "
                "can be captured.",
                stacklevel=2,
            )
        else:
            self.warn_at_ns = self.warn_above * counters.operator_ns

    # --- failing ---------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException, operator: str, *, outermost: bool) -> None:
        """An operator raised, or an interruption struck anywhere on the way: raise what was behind it in its place."""
        if outermost:
            self.memory.recover()
        if not isinstance(error, RuntimeError):
            return
        interruption, refusal = self.limit.take_failure()
        if interruption is not None:
            raise interruption from None
        if isinstance(error, RebuildError):
            raise self._rebuild_error(error, operator) from error
        if refusal is not None:
            raise self._budget_error(refusal, operator) from error

    def _rebuild_error(self, error: RebuildError, operator: str) -> OnlineBudgetError:
        budget, location = self._tightest().budget_bytes, user_source()
        needed = budget + error.missing_bytes
        return OnlineBudgetError(
            f"what {operator} reads was evicted, and no way was found to rebuild it within the budget of "
            f"{format_bytes(budget)}{f' ({location})' if location else ''}: the best takes {format_bytes(needed)}. Take "
            f"a smaller batch, or a budget of {needed} bytes or more.",
            operator=operator, needed_bytes=needed, budget_bytes=budget, location=location,
        )  # fmt: skip

    def _budget_error(self, refusal: Refusal, operator: str) -> OnlineBudgetError:
        session = self._tightest()
        used = refusal.used_bytes - session.base_bytes
        needed, budget, location = used + refusal.wanted_bytes, session.budget_bytes, user_source()
        return OnlineBudgetError(
            f"{operator} needs {format_bytes(needed)} at once: {format_bytes(used)} are in use and cannot be evicted (its "
            f"inputs, and what can not be computed again), {format_bytes(refusal.wanted_bytes)} were asked for on top; the "
            f"budget is {format_bytes(budget)}{f' ({location})' if location else ''}. Take a smaller batch, or a budget of at "
            f"least {needed} bytes.",
            operator=operator, needed_bytes=needed, budget_bytes=budget, location=location,
        )  # fmt: skip

    def _tightest(self) -> Session:
        return min(self.sessions, key=lambda session: session.limit_bytes)

    def raise_refusal(self, error: BaseException | None) -> None:
        """An allocation outside any operator was refused: say so in our words."""
        _, refusal = self.limit.take_failure()
        if refusal is not None and isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise self._budget_error(refusal, "an allocation outside any operator") from error

    # --- sessions --------------------------------------------------------------------------------------------------

    def hold_tightest(self) -> None:
        self.executor.hold(min((session.limit_bytes for session in self.sessions), default=None))

    def forked(self) -> None:
        """In a process of its own nothing is evicted any more."""
        self.memory.lock = threading.RLock()
        self.executor.hold(None)

    def end(self) -> None:
        """The last context ends: tensors that are held become ordinary ones."""
        self.open = False
        with self.memory.lock, _disable_current_modes(), torch.no_grad():
            self.executor.enter_thread()
            try:
                self._restore()
            finally:
                self.executor.hold(None)
                self.memory.clear()
                if self.memory.recorder is not None:
                    self.memory.recorder.writer.close()

    def _restore(self) -> None:
        """Rebuild what the program still holds: it is the program's, so where it does not fit the budget, beyond that by what
        is missing."""
        for _ in range(_EXTENSIONS):
            try:
                return self.engine.restore_all()
            except RuntimeError as error:
                _, refusal = self.limit.take_failure()
                found = error if refusal is None else refusal
                limit_bytes = self.limit.limit_bytes
                if limit_bytes is None or not isinstance(found, (Refusal, RebuildError)):
                    break
                self.executor.hold(limit_bytes + found.missing_bytes)
        self.executor.hold(None)
        self.engine.restore_all()


class Session:
    """One entry into a context: from now on its budget is held. ``mode`` is entered by the thread that runs inside."""

    def __init__(self, budget_bytes: int, run: OnlineRun) -> None:
        self.run = run
        self.mode = run.mode()
        self.budget_bytes = budget_bytes
        self.window = PeakWindow(run.limit.meter)
        self.base_bytes = self.window.start_bytes
        self.limit_bytes = self.base_bytes + budget_bytes
        self.before = run.memory.counters.copy()
        self.peak_bytes: int | None = None  # once it has ended
        run.sessions.append(self)
        run.executor.enter_thread()
        run.hold_tightest()

    def end(self) -> None:
        """The mode was left; the last session ends the run."""
        global _run
        run = self.run
        with _LOCK, run.memory.lock:
            try:
                if run.sessions == [self]:
                    run.end()
            finally:
                self.peak_bytes = self.window.peak_bytes
                self.window.close()
                run.sessions.remove(self)
                if run.sessions:
                    run.hold_tightest()
                else:
                    run.patches.remove()
                    _run = None

    def statistics(self) -> OnlineStatistics:
        peak_bytes = self.window.peak_bytes if self.peak_bytes is None else self.peak_bytes
        return OnlineStatistics(self.budget_bytes, peak_bytes, **self.run.memory.counters.since(self.before))


def _forked() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    if _run is not None:
        _run.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
