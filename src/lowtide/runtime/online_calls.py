"""Run the calls of a model under ``lowtide.online``."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from lowtide.dynamic.context import leave_if_innermost, online
from lowtide.errors import InfeasibleBudgetError, LowtideError, OnlineBudgetError
from lowtide.runtime.caller import is_compiled_around
from lowtide.runtime.calls.result_hooks import tell

_LOG = logging.getLogger(__name__)
_BACKWARD = ("backward", "grad")  # functions of torch.autograd that run a backward pass
_STEPS = 8
_lock = threading.RLock()  # reentrant: garbage collection inside may take it again
_inside: weakref.WeakSet[OnlineCalls] = weakref.WeakSet()
_replaced: dict[str, Any] = {}


class OnlineCalls:
    """Runs calls within ``budget_bytes``, in the online context.

    The context is entered at a call and left when all calls have had their backward pass. It cannot be left within a
    pass, so ``torch.autograd.backward`` and ``grad`` are wrapped meanwhile to report their ends.

    The context holds for the thread of the call; another thread could not read evicted tensors. So a thread other than
    the main one leaves at the end of its call, which restores all tensors, until it was seen to run the backward pass
    itself.

    - ``step_seconds``: how long the latest steps took inside.
    - ``may_exceed``: a step that needs more goes on above the budget, because it would run by a plan. With ``once_met``
      this holds after one step was within the budget, which is a share of what steps took.
    - ``unmet``: why no plan fits the budget. Raised if the budget is too small here as well.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        may_exceed: bool = False,
        unmet: InfeasibleBudgetError | None = None,
        once_met: bool = False,
    ) -> None:
        self.unmet, self._once_met = unmet, once_met
        self._context = online(budget_bytes, device=device)
        # An error between two passes may be caught by code that does not know of the context.
        settings = self._context.settings
        self._context.settings = dataclasses.replace(settings, may_exceed=may_exceed, refuses_once=True)
        self._entered = self._running = self._compiled = self._compiled_before = False
        self._calls: list[_Call] = []
        self._trusted: weakref.WeakSet[threading.Thread] = weakref.WeakSet([threading.main_thread()])
        self.step_seconds: deque[float] = deque(maxlen=_STEPS)
        self._began = 0.0
        self._needed_bytes = 0  # peak of the latest step, until ``check_end``
        self._said = False  # the warning in ``check_end``
        self._left_by: threading.Thread | None = None  # thread of the latest call, if it left at its end
        weakref.finalize(self, _gone, self._context).atexit = False

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._running:  # the model calls itself
            return forward(*args, **kwargs)
        if not self._entered:
            self._compiled = is_compiled_around(sys._getframe(1))
            if self._compiled and not self._compiled_before:
                self._compiled_before = True
                _LOG.warning(
                    "inside of what torch.compile has compiled, the online mode ends with each call of the model"
                )
            self._context.__enter__()
            self._entered, self._began = True, time.perf_counter()
            with _lock:
                _inside.add(self)
                _tell()
        self._running = True
        try:
            result = forward(*args, **kwargs)
        except BaseException as error:
            self._running = False
            found = self.behind(error)
            self.backward_ended()  # leaves, unless earlier calls wait
            if found is not None and found is not error:
                raise found from error
            raise
        self._running = False
        self._calls.append(_Call(result))
        if self._compiled or threading.current_thread() not in self._trusted:
            self._leave_to_others()
        return result

    def _leave_to_others(self) -> None:
        """Leave the context, and watch which thread runs the backward pass."""
        self.leave()
        self._left_by = threading.current_thread()
        with _lock:
            _inside.add(self)
            _tell()

    def backward_ended(self) -> None:
        """A backward pass ended: leave the context, unless it was inside another pass or calls still wait for
        theirs."""
        within = self._running or torch._C._current_graph_task_id() != -1
        if self._left_by is threading.current_thread() and not within:
            self._trusted.add(self._left_by)
        if self._left_by is not None and not (self._entered or within):
            self._left_by = None
            self._left()
        if not self._entered or within or any(call.waits for call in self._calls):
            return
        refused = self._context.has_refused
        if leave_if_innermost(self._context):
            self.step_seconds.append(time.perf_counter() - self._began)
            self._needed_bytes = 0 if refused else self._context.statistics.peak_bytes
            self._left()

    def behind(self, error: BaseException) -> LowtideError | None:
        """The error that the budget is too small, if this caused the exception; joined with the reason why no plan
        fits, if known."""
        found = self._context.behind(error)
        return found if found is None or self.unmet is None else self._nor_here(self.unmet, found)

    @staticmethod
    def _nor_here(unmet: InfeasibleBudgetError, found: LowtideError) -> InfeasibleBudgetError:
        return dataclasses.replace(unmet, message=f"{unmet} That was tried: {found}", midway=True)

    def check_end(self) -> None:
        """Check whether the latest step, with the gradients and results that it ended with, took more than the budget.
        If so, raise ``unmet``, or without it log a warning once and raise the budget: to hold less until steps end
        would take time and save nothing."""
        budget_bytes, needed_bytes = self._context.settings.budget_bytes, self._needed_bytes
        self._needed_bytes = 0
        if needed_bytes <= budget_bytes:
            if self._once_met and needed_bytes:
                self.unmet, self._once_met = None, False
                self._context.settings = dataclasses.replace(self._context.settings, may_exceed=True)
            return
        what = f"a step took {needed_bytes} bytes, with the gradients and results that it ended with"
        if self.unmet is not None:
            found = OnlineBudgetError(
                f"{what}.", operator="the end of a step", needed_bytes=needed_bytes, budget_bytes=budget_bytes
            )
            raise self._nor_here(self.unmet, found) from found
        self._context.settings = dataclasses.replace(self._context.settings, budget_bytes=needed_bytes)
        self.step_seconds.clear()
        if not self._said:
            _LOG.warning("the online mode goes on above its budget of %d bytes: %s", budget_bytes, what)
            self._said = True

    def leave(self) -> None:
        """Leave the context; held tensors become ordinary ones."""
        if self._entered:
            self._context.__exit__(None, None, None)
            self._left()

    def _left(self) -> None:
        self._entered = False
        self._calls.clear()
        with _lock:
            _inside.discard(self)
            _tell()


class _Call:
    """A call that returned ``result``. ``waits``: whether a backward pass may still reach it."""

    def __init__(self, result: Any) -> None:
        self._reached = reached = [False]

        def note(_: torch.Tensor) -> None:
            reached[0] = True

        self._graph = weakref.ref(note)  # the autograd graph keeps it alive
        tell(result, note)

    @property
    def waits(self) -> bool:
        return not self._reached[0] and self._graph() is not None


def _gone(context: online) -> None:
    leave_if_innermost(context)
    with _lock:
        _tell()


def _tell() -> None:
    """Wrap the functions that run backward passes while any ``OnlineCalls`` is inside, and unwrap them otherwise."""
    if _inside and not _replaced:
        for name in _BACKWARD:
            _replaced[name] = function = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _telling(function))
    elif not _inside:
        for name in list(_replaced):
            setattr(torch.autograd, name, _replaced.pop(name))


def _telling(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        inside = list(_inside)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            found = next((found for one in inside if (found := one.behind(error)) is not None), None)
            if found is not None and found is not error:
                raise found from error
            raise
        finally:  # also after a failed pass
            for one in list(_inside):
                one.backward_ended()
        for one in inside:
            one.check_end()
        return result

    return told
