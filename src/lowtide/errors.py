"""The error tree. Every message says what failed, the numbers, and the nearest fix; the data are attributes too."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any


@dataclass(eq=False, repr=False)
class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose."""

    message: str

    def __post_init__(self) -> None:
        self.args = (self.message,)  # what ``str`` shows, however it was given


class NativeCoreError(LowtideError, ImportError):
    """The compiled extension is missing, or was built for another version of the package."""


@dataclass(eq=False, repr=False)
class CaptureError(LowtideError):
    """The model's program cannot be captured as one graph. ``source`` is the user's ``file:line`` where known; ``selects``:
    whether that is because it selects as many rows as data say."""

    _: KW_ONLY
    source: str = ""
    selects: bool = False


class NoGradientError(CaptureError):
    """No output of the model requires a gradient."""


class CostError(LowtideError):
    """An operator could not be measured or modelled."""


class PlanError(LowtideError):
    """A plan cannot be made from this input."""


@dataclass(eq=False, repr=False)
class InfeasibleBudgetError(PlanError):
    """No schedule that the planner knows fits the budget.

    ``minimum_bytes`` is the smallest budget for which a schedule is known, ``operator`` the op at the bottleneck and
    ``source`` the user's ``file:line`` of that op. ``budget_bytes`` is what the planner was given, 0 where that is not known;
    ``aside_bytes`` what is reserved or resident beside it, and part of ``minimum_bytes``. ``overheads`` are budgets from
    ``minimum_bytes`` on, each with the overhead of a schedule that a brief search found within it (0.5: half again the time
    without rematerialization); empty where none is known. ``proven``: no schedule that keeps the order fits. ``plan``: the
    ``Plan`` of the pass by which ``minimum_bytes``, less those beside it, are enough, where one was made. ``midway``: code of
    the model had run before it was raised.
    """

    _: KW_ONLY
    minimum_bytes: int
    operator: str = ""
    source: str = ""
    budget_bytes: int = 0
    aside_bytes: int = 0
    overheads: tuple[tuple[int, float], ...] = ()
    proven: bool = False
    plan: Any = None
    midway: bool = False

    def beside(self, aside_bytes: int, what: str = "") -> InfeasibleBudgetError:
        """The error for a budget of which ``aside_bytes`` are not the pass's; ``what`` they are."""
        if not aside_bytes:
            return self
        least, items = self.minimum_bytes + aside_bytes, f" ({what})" if what else ""
        there = f"{aside_bytes} bytes are reserved or resident"
        enough = f"the budget must be at least {least} bytes."
        message = f"{self} This is the pass alone; {there} outside of it{items}, so {enough}"
        if self.budget_bytes <= 1:
            message = f"{there}{items}, which leaves nothing of the budget for a pass: {enough}"
        above = tuple((budget_bytes + aside_bytes, overhead) for budget_bytes, overhead in self.overheads)
        return replace(self, message=message, minimum_bytes=least, aside_bytes=aside_bytes, overheads=above)


class ScheduleError(LowtideError):
    """A schedule is invalid for its graph."""


class ExecutionError(LowtideError):
    """A planned program was used in a way that it does not support."""


@dataclass(eq=False, repr=False)
class CompiledMismatchError(ExecutionError):
    """A compiled kernel and the operators that it stands for disagree, whose names are ``operators``; or a program with its
    kernels computes something else than the captured one."""

    _: KW_ONLY
    operators: tuple[str, ...] = ()


@dataclass(eq=False, repr=False)
class OnlineBudgetError(LowtideError):
    """What an operator needs at once does not fit the budget of the online mode.

    ``operator`` and ``location``, the user's ``file:line`` where known; ``needed_bytes``, what was in use and could not be
    evicted (the operator's inputs, what can not be computed again) and what was asked for on top; ``budget_bytes``.
    """

    _: KW_ONLY
    operator: str = ""
    needed_bytes: int = 0
    budget_bytes: int = 0
    location: str = ""
