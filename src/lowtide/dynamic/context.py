"""``lowtide.online``: the context manager."""

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
_run: OnlineRun | None = None  # of the contexts that are active


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
        Whose memory the budget is of: ``"cpu"``, a CUDA device or another accelerator; tensors elsewhere stay where they
        are. By default the current accelerator once the program uses it, else the CPU. On an accelerator, room for an
        operator is made before it starts, from what was observed of earlier calls; at first sight its scratch is unknown.
        Nested contexts have one device.
    planning:
        What a program does again, from the end of one backward pass to the end of the next, is planned, and evictions and
        rebuilds follow the plan for as long as the program does: ``"background"``, where the plan gets better while the
        program goes on (the default); ``"wait"``, where it waits for a better one; ``"never"``, by the heuristic alone, as
        it always is where the ``policy`` is not ``"eager"``.

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
        """That the budget is too small, where that is what an exception inside is about."""
        return self._entered[-1].run.behind(error) if self._entered else None

    @property
    def has_refused(self) -> bool:
        """Whether the budget was too small for something inside, so far."""
        return bool(self._entered) and self._entered[-1].run.refused is not None

    @property
    def statistics(self) -> OnlineStatistics:
        """Of the run so far, or of the last one."""
        if self._entered:
            return self._entered[-1].statistics()
        if self._last is None:
            raise ExecutionError("the context was not entered yet, so there are no statistics.")
        return self._last


def leave_if_innermost(context: online) -> bool:
    """Leave a context, where this thread has entered it and nothing since; whether it was left. That is never so inside of an
    operator, where garbage may be collected, too: the mode is put aside there."""
    modes = _get_current_dispatch_mode_stack()
    if not context._entered or not modes or modes[-1] is not context._entered[-1].mode:
        return False
    context.__exit__(None, None, None)
    return True


def is_inside() -> bool:
    """Whether this thread is inside a context."""
    return _run is not None and _run.thread.modes > 0


def _forked() -> None:
    """In a process of its own nothing is evicted any more."""
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
    """By default the current accelerator once the program uses it, else the CPU. ``PlanError`` for what has no budget."""
    if device is not None:
        return find(device).device
    accelerator = accelerator_in_use()
    return torch.device("cpu") if accelerator is None else accelerator.device
