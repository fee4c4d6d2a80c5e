"""The run that all active contexts of the process share: the dispatch mode, and the locking and errors around operators.

A device has one allocator, so there is one engine: the first context entered creates it, and it ends when the last active
context is left, whichever threads they are entered in.
"""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.dynamic.engine import Engine
from lowtide.dynamic.executor import executor_for
from lowtide.dynamic.failures import RebuildError, Refusal
from lowtide.dynamic.foresight import Foresight
from lowtide.dynamic.idle import Idle
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import AccumulateGrad, Origin, current_node, origin_of
from lowtide.dynamic.online_settings import OnlineSettings
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.patches import Access, Patches, UncompiledMode, uncompiled
from lowtide.dynamic.recording import Recorder
from lowtide.dynamic.statistics import OnlineStatistics
from lowtide.errors import ExecutionError, OnlineBudgetError
from lowtide.eviction import Pool
from lowtide.memory.allocators import PeakWindow, meter_of
from lowtide.memory.collector import CollectorSlowed
from lowtide.program.source import user_source
from lowtide.units import format_bytes

_WARN_FROM_NS = 1_000_000_000  # a second of recomputation
_EXTENSIONS = 30  # most times that the limit is raised at the end, each by the missing bytes
_TINY = 1_000_000  # results smaller than a millionth of the budget are never evicted
_PLAIN = torch.Tensor.__torch_dispatch__
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_Result = TypeVar("_Result")


class OnlineMode(UncompiledMode):
    """Dispatch mode below autograd that hands each operator of its thread to the run; views pass through."""

    supports_higher_order_operators = True

    def __init__(self, run: OnlineRun) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run = run
        self.known = run.settings.operators

    def __enter__(self) -> OnlineMode:
        self.run.thread.modes += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.run.thread.modes -= 1

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # what is traced (``torch.export``) has no memory
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind.__torch_dispatch__ is not _PLAIN:
                return NotImplemented  # a tensor subclass: its inner tensors are dispatched again
        operator = self.known.get(id(func))  # hashing an overload would call a Python function
        if operator is None:
            operator = self.known[id(func)] = Operator(func)
        if operator.passes:
            if operator.detaches and isinstance(current_node(), AccumulateGrad):
                self.run.detached(args[0])
            return operator.run(*args, **kwargs) if kwargs else operator.run(*args)
        if operator.composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.run.call(operator, args, kwargs or {})


class _Thread(threading.local):
    modes = 0  # how many modes of the run this thread has entered


class OnlineRun:
    """State shared by all active contexts: the engine, its memory, and the process-wide patches."""

    def __init__(self, settings: OnlineSettings) -> None:
        self.settings = settings
        self.device = settings.device
        meter = meter_of(self.device)
        if meter is None:
            raise ExecutionError(
                "the online mode needs the exact CPU allocation counter, which this build of PyTorch prevents."
            )
        sample, budget_bytes = settings.sample, settings.budget_bytes
        pool = Pool(heuristic=settings.heuristic, sample=sample, skip_small=sample, seed=settings.seed)
        recorder = None if settings.record is None else Recorder(settings.record, self.device.type, budget_bytes)
        self.memory = Memory(pool, meter, settings.policy, recorder, Idle(budget_bytes), settings.may_exceed)
        self.executor = executor_for(self.memory, self.device, settings.observed)
        self.engine = Engine(
            self.memory,
            self.executor,
            settings.experience,
            device=self.device,
            tiny_bytes=budget_bytes // _TINY,
        )
        self.sessions: list[Session] = []
        self.thread = _Thread()
        self.open = True
        self.refused: OnlineBudgetError | None = None  # the most recent budget error
        self.warn_at_ns: float = _WARN_FROM_NS
        self.collector = CollectorSlowed()
        self.patches = Patches(self.materialize, self.resized, self.mode_inside, lambda: self.memory.lock)
        if settings.habits is not None:
            foresight = Foresight(
                settings.habits,
                self.memory,
                self.engine.rebuilder,
                self.patches.threads_aside,
                device_threads=self.device.type != "cpu",
            )
            self.engine.foresight = foresight
            self.memory.on_release, self.memory.on_eviction = foresight.released, foresight.evicted

    def mode_inside(self) -> OnlineMode | None:
        """Return a mode for a thread that the calling thread starts, or ``None`` if the caller is outside."""
        return OnlineMode(self) if self.thread.modes else None

    @uncompiled
    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the program in the engine, under the lock."""
        with self.memory.lock:
            if not self.open:  # a thread that outlived the context
                return operator.run(*args, **kwargs)
            if self.executor.thread != get_ident():
                self.executor.enter_thread()
            outermost = not self.memory.locked
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
        """Mark the tensor's node as a gradient if this detach, which bypasses the engine, hands it to a leaf."""
        with self.memory.lock:
            if self.open and origin_of(current_node()) is Origin.GRADIENT:
                self.memory.node_of(tensor).origin = Origin.GRADIENT

    @uncompiled
    def materialize(self, tensor: torch.Tensor, access: Access) -> Callable[[], None] | None:
        """Make the tensor's bytes resident for an access that bypasses the dispatcher."""
        return self._apart("reading a tensor", self.engine.materialize, tensor, access)

    @uncompiled
    def resized(self, storage: torch.UntypedStorage) -> None:
        """Prepare for a storage's resize, which is about to happen."""
        self._apart("resizing a storage", self.engine.let_go, storage)

    def _apart(self, what: str, function: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """Call an engine function outside of operators: under the lock, without dispatch modes and gradients."""
        with self.memory.lock, _disable_current_modes(), torch.no_grad():
            if not self.open:
                return None
            self.executor.enter_thread()
            outermost = not self.memory.locked
            try:
                return function(*arguments)
            except BaseException as error:
                self._failed(error, what, outermost=outermost)
                raise

    def _warn(self) -> None:
        """Warn once if recomputation takes more than ``warn_above`` times the program's own time."""
        counters = self.memory.counters
        self.warn_at_ns = self.settings.warn_above * counters.operator_ns
        if counters.rematerialize_ns > self.warn_at_ns:
            self.warn_at_ns = sys.maxsize
            warnings.warn(
                f"the online mode has spent {counters.rematerialize_ns / 1e9:.1f} s on recomputing for "
                f"{counters.operator_ns / 1e9:.1f} s of the program's own operators: the budget is too small for this program "
                "to run well in; take a larger one, a smaller batch, or plan ahead with lowtide.rematerialize where the model "
                "can be captured.",
                stacklevel=2,
            )

    # --- failing ---------------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException, operator: str, *, outermost: bool) -> None:
        """Recover after an operator raised or was interrupted, and raise the underlying error if there is another one."""
        if outermost:
            if self.engine.foresight is not None:
                self.engine.foresight.forget()
            self.memory.recover()
        if not isinstance(error, RuntimeError):
            return
        interruption, refusal = self.memory.take_failure()
        if interruption is not None:
            raise interruption from None
        failure = error if isinstance(error, RebuildError) else refusal
        if failure is not None:
            self.memory.may_exceed |= self.settings.refuses_once
            raised = self._budget_error(failure, operator)
            self.refused = replace(raised)  # a copy: the traceback of the raised one keeps the program's frames alive
            raise raised from error

    def _budget_error(self, failure: Refusal | RebuildError, operator: str) -> OnlineBudgetError:
        session = min(self.sessions, key=lambda session: session.limit_bytes)
        budget, location = session.budget_bytes, user_source()
        within = f"{format_bytes(budget)}{f' ({location})' if location else ''}"
        if isinstance(failure, RebuildError):
            needed = budget + failure.missing_bytes
            message = (
                f"what {operator} reads was evicted, and no way was found to rebuild it within the budget of {within}: the "
                f"best takes {format_bytes(needed)}. Take a smaller batch, or a budget of {needed} bytes or more."
            )
        else:
            used = failure.used_bytes - session.window.start_bytes
            needed = used + failure.wanted_bytes
            message = (
                f"{operator} needs {format_bytes(needed)} at once: {format_bytes(used)} are in use and cannot be evicted (its "
                f"inputs, and what can not be computed again), {format_bytes(failure.wanted_bytes)} were asked for on top; the "
                f"budget is {within}. Take a smaller batch, or a budget of at least {needed} bytes."
            )
        return OnlineBudgetError(
            message, operator=operator, needed_bytes=needed, budget_bytes=budget, location=location
        )

    def behind(self, error: BaseException | None) -> OnlineBudgetError | None:
        """Return the budget error behind an exception, or ``None``. TorchScript replaces it by an error of its own."""
        if isinstance(error, RuntimeError) and "failed in the TorchScript interpreter" in str(error):
            return self.refused
        return error if isinstance(error, OnlineBudgetError) else None

    def raise_refusal(self, error: BaseException | None) -> None:
        """Raise ``OnlineBudgetError`` if an allocation was refused outside any operator, or inside of code (TorchScript) that
        replaces our exception."""
        if (refused := self.behind(error)) is not None and refused is not error:
            raise refused from error
        _, refusal = self.memory.take_failure()
        if refusal is not None and isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise self._budget_error(refusal, "an allocation outside any operator") from error

    # --- the limit and the end ---------------------------------------------------------------------------------------

    def hold_tightest(self) -> None:
        self.executor.hold(min((session.limit_bytes for session in self.sessions), default=None))

    def end(self) -> None:
        """End the run with its last context: restore all tensors that the program holds to ordinary ones."""
        self.open = False
        self.settings.experience.operator_ns += self.memory.counters.operator_ns
        with self.memory.lock, _disable_current_modes(), torch.no_grad():
            self.executor.enter_thread()
            foresight = self.engine.foresight
            try:
                try:
                    if foresight is not None:
                        foresight.close()
                finally:
                    self._restore()
            finally:
                self.executor.hold(None)
                self.memory.clear()
                if self.memory.recorder is not None:
                    self.memory.recorder.close()
            if foresight is not None:
                foresight.learn()

    def _restore(self) -> None:
        """Rebuild everything that the program still holds. If that does not fit the budget, raise the limit by the missing
        bytes and retry, at last without any limit."""
        for _ in range(_EXTENSIONS):
            try:
                return self.engine.restore_all()
            except RuntimeError as error:
                _, refusal = self.memory.take_failure()
                found = error if refusal is None else refusal
                limit_bytes = self.memory.limit_bytes
                if limit_bytes is None or not isinstance(found, (Refusal, RebuildError)):
                    break
                self.executor.hold(limit_bytes + found.missing_bytes)
        self.executor.hold(None)
        self.engine.restore_all()


class Session:
    """One entry into a context; enforces its budget from creation. The thread that runs inside enters ``mode``."""

    def __init__(self, budget_bytes: int, run: OnlineRun) -> None:
        self.run = run
        self.mode = OnlineMode(run)
        self.budget_bytes = budget_bytes
        self.window = PeakWindow(run.memory.meter)
        self.limit_bytes = self.window.start_bytes + budget_bytes
        self.before = copy.copy(run.memory.counters)
        self.peak_bytes: int | None = None  # set when it ends
        run.sessions.append(self)
        run.executor.enter_thread()
        run.hold_tightest()

    def end(self) -> None:
        """End the session after its mode was exited. The last session ends the run."""
        run = self.run
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
                run.collector.end()

    def statistics(self) -> OnlineStatistics:
        peak_bytes = self.window.peak_bytes if self.peak_bytes is None else self.peak_bytes
        return self.run.memory.counters.since(self.before, self.budget_bytes, peak_bytes)
