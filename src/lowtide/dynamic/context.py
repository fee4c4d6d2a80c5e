"""``lowtide.online``, the context manager of the online mode."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from types import TracebackType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.budget import is_amount, is_percentage, parse_budget
from lowtide.device import accelerator_in_use, find
from lowtide.dynamic.habits import PLANNING, Habits
from lowtide.dynamic.online_settings import OnlineSettings
from lowtide.dynamic.run import OnlineRun, Session
from lowtide.dynamic.statistics import OnlineStatistics
from lowtide.errors import ExecutionError, OnlineBudgetError, PlanError
from lowtide.eviction import HEURISTICS
from lowtide.solve import check_seed

__all__ = ["OnlineStatistics", "is_inside", "online"]

POLICIES = ("eager", "ignore", "banish")

_LOCK = threading.RLock()
_run: OnlineRun | None = None  # the run shared by all active contexts; None outside of any


class online:
    """Run plain eager PyTorch inside a memory budget: ``with lowtide.online("2GiB"): train()``.

    Works for any program: forward, backward, double backward, optimizer steps, inference, any control flow. When an
    allocation would exceed the budget, tensors are evicted; they are rebuilt when they are read (Kirisame et al., ICLR
    2021, arXiv 2006.09616). Results equal those of plain eager execution bit for bit: random operators are recomputed
    under the generator state of their first run, and writes happen once. The object can be entered again. Contexts can
    be nested: the tightest budget counts.

    Parameters
    ----------
    budget:
        Bytes that may be allocated above what was allocated on entry: an ``int``, or a string with a unit (``"2GiB"``).
    heuristic:
        How victims are chosen: ``dtr-eq``, ``dtr``, ``e-star``, ``dtr-local``, ``lru``, ``size``, ``msps`` or ``random``
        (``lowtide.eviction``).
    policy:
        How to treat a tensor that the program released: ``"eager"`` frees it at once and may recompute it to rebuild
        others; ``"ignore"`` keeps it until it is evicted; ``"banish"`` frees it and, as soon as no evicted tensor needs
        it, never again evicts what was computed from it.
    sample:
        Choose victims from a random sample (as many as the square root of the tensors) and skip the smallest tensors, as
        the paper's prototype does, instead of scoring all.
    record:
        Path of a file to write a trace of the run to (``lowtide trace`` replays it); only the outermost context's counts.
    seed:
        Random seed of the sample and of the heuristic ``random``.
    warn_above:
        Warn once when recomputation has taken more than this multiple of the program's own time.
    device:
        The device whose memory the budget limits: ``"cpu"``, a CUDA device or another accelerator; tensors on other devices
        are never evicted. Default: the current accelerator if the program already uses it, else the CPU. On an accelerator,
        room is made before an operator starts, from the memory that earlier calls took; the scratch of its first call is
        unknown. Nested contexts must have the same device.
    planning:
        How repeated cycles (from the end of one backward pass to the end of the next) are planned; evictions and rebuilds
        follow the plan as long as the program repeats the cycle. ``"background"`` (default) improves the plan while the
        program runs; ``"wait"`` makes the program wait for a better one; ``"never"`` uses the heuristic alone, as every
        ``policy`` but ``"eager"`` does.

    Raises
    ------
    OnlineBudgetError
        If one operator's inputs, results and scratch, together with what cannot be evicted, exceed the budget, or if no
        way is found to rebuild the operator's inputs within it. The program can go on in the same context, for example
        with a smaller batch.
    PlanError
        If an argument is invalid.
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
        planning: str | None = None,
    ) -> None:
        if is_percentage(budget):
            raise PlanError(
                f"a budget of {budget!r} needs a peak to be a part of, which nobody knows before an online run; give bytes, "
                "such as '2GiB', or measure the run first: lowtide.measure(train_step).peak_bytes."
            )
        budget_bytes = parse_budget(budget, None)
        if heuristic not in tuple(HEURISTICS):
            raise PlanError(f"no heuristic is named {heuristic!r}; known: {', '.join(HEURISTICS)}.")
        if policy not in POLICIES:
            raise PlanError(f"no policy is named {policy!r}; known: {', '.join(POLICIES)}.")
        if not isinstance(record, str | os.PathLike | None):
            raise PlanError(f"record is {record!r}, but names a file, such as 'run.trace.gz'.")
        if not is_amount(warn_above):
            raise PlanError(f"warn_above is {warn_above!r}, but is a multiple of the program's own time, such as 2.0.")
        check_seed(seed)
        habits = _habits(planning, policy)
        memory = _device_of_budget(device)
        self.settings = OnlineSettings(
            budget_bytes, heuristic, policy, sample, record, seed, warn_above, memory, habits
        )
        if habits is not None:
            weakref.finalize(self, habits.searches.stop)
        self._entered: list[Session] = []
        self._last: OnlineStatistics | None = None

    def __enter__(self) -> online:
        global _run
        with _LOCK:
            if _run is None:
                _run = OnlineRun(self.settings)
            elif self.settings.device != _run.device:
                raise PlanError(
                    f"a context for {_run.device} is active, and one for {self.settings.device} cannot be entered inside it."
                )
            with _run.memory.lock:
                session = Session(self.settings.budget_bytes, _run)
        self._entered.append(session)
        session.mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _run
        session = self._entered.pop()
        session.mode.__exit__(None, None, None)
        with _LOCK, session.run.memory.lock:
            try:
                session.end()
            finally:
                self._last = session.statistics()
                if not session.run.sessions:
                    _run = None
        session.run.raise_refusal(error)

    def behind(self, error: BaseException) -> OnlineBudgetError | None:
        """Return the budget error that caused ``error``, an exception raised inside the context; ``None`` for other causes."""
        return self._entered[-1].run.behind(error) if self._entered else None

    @property
    def has_refused(self) -> bool:
        """Whether any allocation or rebuild has failed for lack of budget so far."""
        return bool(self._entered) and self._entered[-1].run.refused is not None

    @property
    def statistics(self) -> OnlineStatistics:
        """Statistics of the current entry so far, or of the most recent one. ``ExecutionError`` before the first."""
        if self._entered:
            return self._entered[-1].statistics()
        if self._last is None:
            raise ExecutionError("the context was not entered yet, so there are no statistics.")
        return self._last


def leave_if_innermost(context: online) -> bool:
    """Exit the context if its mode is the innermost dispatch mode of this thread; return whether it was exited. Never exits
    inside an operator, where the garbage collector may call this, too: the mode is disabled there."""
    modes = _get_current_dispatch_mode_stack()
    if not context._entered or not modes or modes[-1] is not context._entered[-1].mode:
        return False
    context.__exit__(None, None, None)
    return True


def is_inside() -> bool:
    """Whether the current thread is inside an online context."""
    return _run is not None and _run.thread.modes > 0


def _forked() -> None:
    """Turn eviction off in a forked child process: renew the locks, detach foresight and lift the limit."""
    global _LOCK
    _LOCK = threading.RLock()
    if _run is not None:
        _run.memory.lock = threading.RLock()
        _run.engine.foresight = _run.memory.on_release = _run.memory.on_eviction = None
        _run.executor.hold(None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _habits(planning: str | None, policy: str) -> Habits | None:
    if planning is not None and planning not in PLANNING:
        raise PlanError(f"planning is {planning!r}, but must be one of {', '.join(map(repr, PLANNING))}.")
    if policy != "eager":
        if planning in ("background", "wait"):
            raise PlanError(f"plans are made for the policy 'eager', not for {policy!r}; leave planning out.")
        return None
    return None if planning == "never" else Habits(planning or "background")


def _device_of_budget(device: torch.device | str | None) -> torch.device:
    """Return the budget's device: by default the accelerator in use, else the CPU. ``PlanError`` if it cannot have a budget."""
    if device is not None:
        return find(device).device
    accelerator = accelerator_in_use()
    return torch.device("cpu") if accelerator is None else accelerator.device
