"""``lowtide.online``: the context manager."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowtide.budget import is_amount, is_percentage, parse_budget
from lowtide.capture.source import user_source
from lowtide.dynamic import threads, touch
from lowtide.dynamic.engine import Engine
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.rebuild import RebuildError
from lowtide.dynamic.room import Refusal, Room, device_of_budget, room_of
from lowtide.dynamic.tally import Tally
from lowtide.dynamic.uncompiled import as_written, uncompiled
from lowtide.errors import ExecutionError, OnlineBudgetError, PlanError
from lowtide.eviction import HEURISTICS, Pool
from lowtide.solve import check_seed
from lowtide.trace import TraceWriter
from lowtide.units import format_bytes

POLICIES = ("eager", "ignore", "banish")
_WARN_FROM_NS = 1_000_000_000  # a second of recomputation
_EXTENSIONS = 30  # of the limit at the end, at most, each by what was found to be missing
_TINY = 1_000_000  # results of less than a millionth of the budget are kept


@dataclass(frozen=True, slots=True)
class OnlineStatistics:
    """What a context did. Times in nanoseconds of wall time; bytes above the level at which the context was entered.

    ``operators`` and ``operator_ns``: run for the program, recomputation not counted. ``copies``: old contents kept because
    what had been computed from them could not be rebuilt before they changed.
    """

    budget_bytes: int
    peak_bytes: int
    operators: int
    operator_ns: int
    evictions: int
    evicted_bytes: int
    evict_ns: int
    rematerializations: int
    rematerialize_ns: int
    copies: int

    @property
    def overhead_percent(self) -> float:
        """Time spent on evicting and rebuilding, over the time of the program's own operators."""
        return 100.0 * (self.evict_ns + self.rematerialize_ns) / max(self.operator_ns, 1)


class online:
    """Run plain eager PyTorch inside a memory budget: ``with lowtide.online("2GiB"): train()``.

    Any program: forward, backward, double backward, optimizer steps, inference, any control flow. Where an allocation
    would exceed the budget, tensors are evicted, and rebuilt when they are read (Kirisame et al., ICLR 2021, arXiv
    2006.09616). Results are those of plain eager execution to the bit: random operators are made again under their own
    generator state, writes happen once. The object can be entered again, and contexts can be nested: the tightest budget
    counts.

    Parameters
    ----------
    budget:
        Bytes that may be allocated above what was allocated on entry: an ``int``, or a string with a unit (``"2GiB"``).
    heuristic:
        What to evict: ``dtr-eq``, ``dtr``, ``e-star``, ``dtr-local``, ``lru``, ``size``, ``msps`` or ``random``
        (``lowtide.eviction``).
    policy:
        What to do with a tensor that the program released: ``"eager"`` frees it at once and may compute it again for
        others; ``"ignore"`` keeps it until it is evicted; ``"banish"`` frees it and, as soon as nothing evicted needs it,
        keeps what was computed from it for good.
    sample:
        Choose from a random sample of root-many tensors and leave out the smallest, as the paper's prototype does, instead
        of looking at all.
    record:
        A path to write the run to as a trace (``lowtide trace`` replays it); the outermost context's counts.
    seed:
        Of the sample and of ``random``.
    warn_above:
        Warn once when recomputation has taken more than this multiple of the program's own time.
    device:
        Whose memory the budget is of: ``"cpu"``, or a CUDA device; tensors elsewhere stay where they are. By default the
        current CUDA device once the program uses CUDA, else the CPU. On CUDA, room for an operator is made before it
        starts, from what was observed of earlier calls; at first sight its scratch is unknown. Nested contexts have
        one device.

    Raises
    ------
    OnlineBudgetError
        Where what one operator reads, returns and uses inside, with what can not be evicted, exceeds the budget, or where
        no way is found to rebuild within it what the operator reads. The program can go on, with a smaller batch, say, in
        the same context.
    PlanError
        If an argument makes no sense.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        heuristic: str = "dtr-eq",
        policy: str = "eager",
        sample: bool = True,
        record: str | Path | None = None,
        seed: int = 0,
        warn_above: float = 2.0,
        device: torch.device | str | None = None,
    ) -> None:
        if is_percentage(budget):
            raise PlanError(
                f"a budget of {budget!r} needs a peak to be a part of, which nobody knows before an online run; give bytes, "
                "such as '2GiB', or measure the run first: lowtide.measure(train_step).peak_bytes."
            )
        self.budget_bytes = parse_budget(budget, 0)
        if heuristic not in tuple(HEURISTICS):
            raise PlanError(f"no heuristic is named {heuristic!r}; known: {', '.join(HEURISTICS)}.")
        if policy not in POLICIES:
            raise PlanError(f"no policy is named {policy!r}; known: {', '.join(POLICIES)}.")
        if not is_amount(warn_above):
            raise PlanError(f"warn_above is {warn_above!r}, but is a multiple of the program's own time, such as 2.0.")
        check_seed(seed)
        self.heuristic = heuristic
        self.policy = policy
        self.sample = sample
        self.record = record
        self.seed = seed
        self.warn_above = warn_above
        self.device = device_of_budget(device)
        self._entered: list[_Session] = []
        self._last: OnlineStatistics | None = None

    def __enter__(self) -> online:
        with _LOCK:
            session = _Session(self, _engine_for(self))
            self._entered.append(session)
        session.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._entered.pop()
        try:
            session.end()
        finally:
            self._last = session.statistics()
        session.run.raise_refusal(error)

    @property
    def statistics(self) -> OnlineStatistics:
        """Of the run so far, or of the last one."""
        if self._entered:
            return self._entered[-1].statistics()
        if self._last is None:
            raise ExecutionError("the context was not entered yet, so there are no statistics.")
        return self._last


_LOCK = threading.RLock()
_run: _Run | None = None


class _Run:
    """What all active contexts of the process share: the engine, and the room it works in."""

    def __init__(self, engine: Engine, room: Room, warn_above: float) -> None:
        self.engine = engine
        self.room = room
        self.sessions: list[_Session] = []
        self.open = True
        self.warn_above = warn_above
        self.warn_at_ns: float = _WARN_FROM_NS
        self.modes = threading.local()  # how many of ours the thread is in
        self.compile_again = as_written()

    @uncompiled
    def call(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        room = self.room
        with self.engine.lock:
            if not self.open:  # a thread that outlived the context
                return operator.run(*args, **kwargs)
            if room.thread != threading.get_ident():
                room.enter_thread()
            outermost = self.engine.idle
            try:
                result = self.engine.run(operator, args, kwargs)
                if self.engine.tally.rematerialize_ns > self.warn_at_ns:
                    self.warn()
                return result
            except BaseException as error:
                self.failed(error, operator.name, outermost=outermost)
                raise

    def warn(self) -> None:
        """Say once that the program mostly recomputes."""
        tally = self.engine.tally
        if tally.rematerialize_ns > self.warn_above * tally.operator_ns:
            self.warn_at_ns = sys.maxsize
            warnings.warn(
                f"the online mode has spent {tally.rematerialize_ns / 1e9:.1f} s on recomputing for "
                f"{tally.operator_ns / 1e9:.1f} s of the program's own operators: the budget is too small for this program to "
                "run well in; take a larger one, a smaller batch, or plan ahead with lowtide.rematerialize where the model "
                "can be captured.",
                stacklevel=2,
            )
        else:
            self.warn_at_ns = self.warn_above * tally.operator_ns

    @uncompiled
    def detached(self, tensor: torch.Tensor) -> None:
        """By a view, which passes the engine by."""
        with self.engine.lock:
            if self.open:
                self.engine.detached(tensor)

    @uncompiled
    def touch(self, tensor: torch.Tensor, access: touch.Access) -> Callable[[], None] | None:
        """From outside the dispatcher."""
        with self.engine.lock, _disable_current_modes(), torch.no_grad():
            self.room.enter_thread()
            outermost = self.engine.idle
            try:
                return self.engine.touch(tensor, access)
            except BaseException as error:
                self.failed(error, "reading a tensor", outermost=outermost)
                raise

    def failed(self, error: BaseException, operator: str, *, outermost: bool) -> None:
        """What an operator raised, or an interruption anywhere on the way."""
        if outermost:
            self.engine.memory.recover()
        if isinstance(error, RuntimeError):
            self.explain(error, operator)

    def explain(self, error: RuntimeError, operator: str) -> None:
        """Raise in its place what interrupted an allocation, or that the budget is too small."""
        interruption, refusal = self.room.failure()
        if interruption is not None:
            raise interruption from None
        if isinstance(error, RebuildError):
            raise self.rebuild_error(error, operator) from error
        if refusal is not None:
            raise self.budget_error(refusal, operator) from error

    def rebuild_error(self, error: RebuildError, operator: str) -> OnlineBudgetError:
        session = self.tightest()
        budget, location = session.budget_bytes, user_source()
        needed = budget + error.missing_bytes
        return OnlineBudgetError(
            f"what {operator} reads was evicted, and no way was found to rebuild it within the budget of "
            f"{format_bytes(budget)}{f' ({location})' if location else ''}: the best takes {format_bytes(needed)}. Take "
            f"a smaller batch, or a budget of {needed} bytes or more.",
            operator=operator, needed_bytes=needed, budget_bytes=budget, location=location,
        )  # fmt: skip

    def tightest(self) -> _Session:
        return min(self.sessions, key=lambda session: session.limit_bytes)

    def budget_error(self, refusal: Refusal, operator: str) -> OnlineBudgetError:
        session = self.tightest()
        used = refusal.used_bytes - session.base_bytes
        needed, budget, location = used + refusal.wanted_bytes, session.budget_bytes, user_source()
        return OnlineBudgetError(
            f"{operator} needs {format_bytes(needed)} at once: {format_bytes(used)} are in use and cannot be evicted (its "
            f"inputs, and what can not be computed again), {format_bytes(refusal.wanted_bytes)} were asked for on top; the "
            f"budget is {format_bytes(budget)}{f' ({location})' if location else ''}. Take a smaller batch, or a budget of at "
            f"least {needed} bytes.",
            operator=operator, needed_bytes=needed, budget_bytes=budget, location=location,
        )  # fmt: skip

    def raise_refusal(self, error: BaseException | None) -> None:
        """An allocation outside any operator was refused: say so in our words."""
        _, refusal = self.room.failure()
        if refusal is not None and isinstance(error, RuntimeError) and "can't allocate memory" in str(error):
            raise self.budget_error(refusal, "an allocation outside any operator") from error

    def inside(self) -> _Mode | None:
        """For a thread that the calling one starts."""
        return _Mode(self) if getattr(self.modes, "depth", 0) else None

    def forked(self) -> None:
        """In a process of its own nothing is evicted any more."""
        self.engine.lock = threading.RLock()
        self.room.hold(None)

    def hold_limit(self) -> None:
        self.room.hold(min((session.limit_bytes for session in self.sessions), default=None))

    def leave(self) -> None:
        """The last context ends: tensors that are held become ordinary ones."""
        self.open = False
        engine, room = self.engine, self.room
        with engine.lock, _disable_current_modes(), torch.no_grad():
            room.enter_thread()
            try:
                self._restore()
            finally:
                room.hold(None)
                engine.memory.forget()
                if engine.recorder is not None:
                    engine.recorder.close()

    def _restore(self) -> None:
        """Rebuild what the program still holds: it is the program's, so where it does not fit the budget, beyond that by what
        is missing."""
        room = self.room
        for _ in range(_EXTENSIONS):
            try:
                return self.engine.restore_all()
            except RuntimeError as error:
                _, refusal = room.failure()
                found = error if refusal is None else refusal
                if room.limit_bytes is None or not isinstance(found, (Refusal, RebuildError)):
                    break
                room.hold(room.limit_bytes + found.missing_bytes)
        room.hold(None)
        self.engine.restore_all()


class _Session:
    """One entry into a context."""

    def __init__(self, context: online, run: _Run) -> None:
        self.context = context
        self.run = run
        self.mode = _Mode(run)
        self.budget_bytes = context.budget_bytes
        self.base_bytes = run.room.meter.level_bytes
        self.limit_bytes = self.base_bytes + self.budget_bytes
        self.before = Tally()
        self.peak_bytes: int | None = None
        self.outer_peak_bytes = 0

    def begin(self) -> None:
        run = self.run
        with run.engine.lock:
            run.sessions.append(self)
            run.room.enter_thread()
            run.hold_limit()
            self.before = run.engine.tally.copy()
            self.outer_peak_bytes = run.room.meter.peak_bytes
            run.room.meter.reset_peak()
        self.mode.__enter__()

    def end(self) -> None:
        global _run
        run = self.run
        self.mode.__exit__(None, None, None)
        with _LOCK, run.engine.lock:
            try:
                if run.sessions == [self]:
                    run.leave()
            finally:
                meter = run.room.meter
                self.peak_bytes = meter.peak_bytes - self.base_bytes
                meter.raise_peak(self.outer_peak_bytes)
                run.sessions.remove(self)
                if run.sessions:
                    run.hold_limit()
                else:
                    touch.remove()
                    threads.remove()
                    run.compile_again()
                    _run = None

    def statistics(self) -> OnlineStatistics:
        now, before = self.run.engine.tally.__dict__, self.before.__dict__
        peak = self.run.room.meter.peak_bytes - self.base_bytes if self.peak_bytes is None else self.peak_bytes
        return OnlineStatistics(self.budget_bytes, peak, **{name: now[name] - before[name] for name in before})


def is_inside() -> bool:
    """Whether this thread is inside a context."""
    run = _run
    return run is not None and getattr(run.modes, "depth", 0) > 0


_PLAIN = torch.Tensor.__torch_dispatch__


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every operator to the engine; views pass."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, run: _Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = run.call
        self.detached = run.detached
        self.modes = run.modes
        self.known: dict[Any, Operator] = {}

    def __enter__(self) -> _Mode:
        self.modes.depth = getattr(self.modes, "depth", 0) + 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.modes.depth -= 1

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(kind.__torch_dispatch__ is not _PLAIN for kind in types):
            return NotImplemented  # a tensor subclass: what it is made of comes by
        operator = self.known.get(func)
        if operator is None:
            operator = self.known[func] = Operator(func)
        if operator.passes:
            if operator.detaches:
                self.detached(args[0])
            return func(*args, **kwargs) if kwargs else func(*args)
        if operator.composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.call(operator, args, kwargs or {})


def _engine_for(context: online) -> _Run:
    """The run in progress, or a new one with this context's heuristic."""
    global _run
    if _run is not None:
        outer = _run.engine.device
        if context.device != outer:
            raise PlanError(
                f"a context for {outer} is active, and one for {context.device} cannot be entered inside it."
            )
        return _run
    pool = Pool(heuristic=context.heuristic, sample=context.sample, skip_small=context.sample, seed=context.seed)
    engine = Engine(
        pool,
        device=context.device,
        tiny_bytes=context.budget_bytes // _TINY,
        banish=context.policy == "banish",
        ignore=context.policy == "ignore",
    )
    _run = _Run(engine, room_of(engine), context.warn_above)
    if context.record is not None:
        engine.recorder = TraceWriter(
            context.record, name=Path(context.record).stem, device=engine.device.type, budget_bytes=context.budget_bytes
        )
    touch.install(_run.touch)
    threads.install(_run.inside)
    return _run


def _forked() -> None:
    global _LOCK
    _LOCK = threading.RLock()
    if _run is not None:
        _run.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
