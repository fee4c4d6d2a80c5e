"""``lowtide.checked``: from time to time capture a planned call anew, and compare with its plan."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from lowtide.capture import Captured
from lowtide.capture.python_state.effects.held_inputs import held_tensors
from lowtide.errors import CaptureError, ExecutionError, PlanError
from lowtide.objects.keys import fingerprint


class _Thread(threading.local):
    contexts: tuple[checked, ...] = ()  # open contexts, innermost last


_THREAD = _Thread()


class checked:
    """A context in which every ``every``-th planned call of this thread is captured anew and compared with its plan.

    Guards compare what the model's Python code read when it was captured. If that code depends on something that no
    guard sees (a clock, the state of a native extension, variables of an installed library), a plan becomes stale
    without notice. This context detects it. A check takes one capture; it changes neither the model nor any random
    generator. Contexts nest, and the innermost counts. Calls inside ``lowtide.online`` have no plans and are not
    checked.

    Raises ``ExecutionError`` from the call that would have run a stale plan, with the difference, and ``PlanError`` if
    ``every`` is not a positive integer.
    """

    def __init__(self, *, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise PlanError(
                f"every={every!r} must be a positive integer: every=1 checks each call, every=100 one in a hundred."
            )
        self.every = every
        self.calls = 0

    def __enter__(self) -> checked:
        _THREAD.contexts = (*_THREAD.contexts, self)
        return self

    def __exit__(self, *error: object) -> None:
        _THREAD.contexts = _THREAD.contexts[:-1]


def is_due() -> bool:
    """Count a planned call that begins now. Returns whether it is to be checked."""
    if not _THREAD.contexts:
        return False
    context = _THREAD.contexts[-1]
    context.calls += 1
    return context.calls % context.every == 0


def check(capture: Callable[[], Captured], planned: Captured, model: nn.Module) -> None:
    """Call ``capture`` for the call that is about to run as ``planned``, and compare. Raises ``ExecutionError`` if the
    two differ."""
    try:
        now, planned = capture().on(model), planned.on(model)
    except CaptureError as error:
        raise ExecutionError(f"{type(model).__name__} was planned, but cannot be captured now: {error}") from error
    if _draws(now) == _draws(planned) and now.same_as(planned, {id(tensor) for tensor in held_tensors(model)}):
        return
    raise ExecutionError(
        f"{type(model).__name__} is about to run a stale plan: {_difference(now, planned)}. Its forward pass depends on "
        "something that no guard sees (a clock, a native extension, a variable of an installed library). Pass that as an "
        "argument or keep it in an attribute or a buffer; if there is nothing of the kind, this is an error of lowtide: please "
        "report it."
    )


def _draws(captured: Captured) -> bool:
    return captured.contract.conditions.draws is not None


def _difference(now: Captured, planned: Captured) -> str:
    ours, theirs = now.program.graph.ops, planned.program.graph.ops
    for op, other, call, old in zip(ours, theirs, now.program.calls, planned.program.calls, strict=False):
        at = f" at {op.source}" if op.source else ""
        if op.target != other.target:
            return f"operator {op.id} is {op.target} instead of {other.target}{at}"
        if repr((call.args, call.kwargs)) != repr((old.args, old.kwargs)):
            return f"operator {op.id}, {op.target}, has other arguments{at}"
    if len(ours) != len(theirs):
        at = f" at {ours[-1].source}" if ours[-1].source else ""
        return f"{len(ours)} operators instead of {len(theirs)}{at}"
    if repr(now.contract.settings) != repr(planned.contract.settings):
        return "it leaves other values in attributes"
    if now.contract.writes != planned.contract.writes:
        return "it writes otherwise into its arguments"
    if fingerprint(now.contract.result_structure) != fingerprint(planned.contract.result_structure):
        return "its result has another structure"
    if _draws(now) != _draws(planned):
        return "it draws from the generators of Python or NumPy in another way"
    return "a constant that it computes with, or a tensor that it leaves, is another one"
