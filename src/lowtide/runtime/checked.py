"""``lowtide.checked``: planned calls are captured anew from time to time, and compared with what is about to run."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType

from torch import nn

from lowtide.capture import Captured
from lowtide.errors import ExecutionError, PlanError
from lowtide.program.keys import fingerprint


class _Thread(threading.local):
    contexts: tuple[checked, ...] = ()  # that are open, the innermost last


_THREAD = _Thread()


class checked:
    """Inside, every ``every``-th planned call of this thread is captured anew, and must be the program that its plan is for.

    Guards compare what the model's Python code read when it was captured. Where that code depends on what no guard sees
    (a clock, the state of a native extension, variables of an installed library), a plan goes stale unnoticed; here it
    is noticed. A check takes a capture; it changes neither the model nor any random generator. Contexts nest, and the
    innermost counts.

    Raises ``ExecutionError`` from the call that would have run a stale plan, with what differs, and ``PlanError`` where
    ``every`` is no positive integer.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _THREAD.contexts = _THREAD.contexts[:-1]


def is_due() -> bool:
    """Whether the planned call that begins now is to be checked."""
    if not _THREAD.contexts:
        return False
    context = _THREAD.contexts[-1]
    context.calls += 1
    return context.calls % context.every == 0


@dataclass(frozen=True, slots=True)
class _Difference:
    what: str
    source: str = ""


def require_same(now: Captured, planned: Captured, held: Collection[int], model: nn.Module) -> None:
    """Raises ``ExecutionError`` where a call is another one than was planned. ``held``: ids of tensors in attributes."""
    drawing, drew = (one.contract.conditions.draws is not None for one in (now, planned))
    if drawing == drew and now.same_as(planned, held):
        return
    found = _difference(now, planned)
    place = f" at {found.source}" if found.source else ""
    raise ExecutionError(
        f"{type(model).__name__} is about to run a stale plan: {found.what}{place}. Its forward pass depends on something "
        "that no guard sees (a clock, a native extension, a variable of an installed library). Pass that as an argument or "
        "keep it in an attribute or a buffer; if there is nothing of the kind, this is an error of lowtide: please report it."
    )


def _difference(now: Captured, planned: Captured) -> _Difference:
    ours, theirs = now.program.graph.ops, planned.program.graph.ops
    for op, other, call, old in zip(ours, theirs, now.program.calls, planned.program.calls, strict=False):
        if op.target != other.target:
            return _Difference(f"operator {op.id} is {op.target} instead of {other.target}", op.source)
        if repr((call.args, call.kwargs)) != repr((old.args, old.kwargs)):
            return _Difference(f"operator {op.id}, {op.target}, has other arguments", op.source)
    if len(ours) != len(theirs):
        return _Difference(f"{len(ours)} operators instead of {len(theirs)}", ours[-1].source)
    if repr(now.contract.settings) != repr(planned.contract.settings):
        return _Difference("it leaves other values in attributes")
    if fingerprint(now.contract.result_structure) != fingerprint(planned.contract.result_structure):
        return _Difference("its result has another structure")
    if (now.contract.conditions.draws is None) != (planned.contract.conditions.draws is None):
        return _Difference("it draws from the generators of Python or NumPy in another way")
    return _Difference("a constant that it computes with, or a tensor that it leaves, is another one")
