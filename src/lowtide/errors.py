"""The exception classes. Every message says what failed, with numbers, and the simplest fix; the data are also
attributes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Any


@dataclass(eq=False, repr=False)
class LowtideError(Exception):
    """Base of every error that lowtide raises on purpose."""

    message: str

    def __post_init__(self) -> None:
        self.args = (self.message,)  # shown by ``str``, also if passed as a keyword


class NativeCoreError(LowtideError, ImportError):
    """The compiled extension is missing, or was built for another version of the package."""


@dataclass(eq=False, repr=False)
class CaptureError(LowtideError):
    """The model's program cannot be captured as one graph. ``source``: the user's ``file:line``, if known. ``selects``:
    whether the reason is that it selects a number of rows that depends on data."""

    _: KW_ONLY
    source: str = ""
    selects: bool = False


class NoGradientError(CaptureError):
    """No output of the model requires a gradient."""


class CostError(LowtideError):
    """An operator could not be measured or modelled."""


class PlanError(LowtideError):
    """No plan can be made from this input."""


@dataclass(eq=False, repr=False)
class InfeasibleBudgetError(PlanError):
    """No schedule that the planner knows fits the budget.

    - ``minimum_bytes``: the smallest budget for which a schedule is known. ``operator``: the op at the bottleneck,
      ``source``: the user's ``file:line`` of that op.
    - ``budget_bytes``: what the planner was given, 0 if unknown. ``aside_bytes``: what is reserved or resident beside
      it, included in ``minimum_bytes``.
    - ``overheads``: budgets from ``minimum_bytes`` on, each with the overhead of a schedule that a brief search found
      (0.5: half again the time without rematerialization); may be empty.
    - ``proven``: no schedule that keeps the order fits. ``plan``: the ``Plan`` of the pass that needs ``minimum_bytes``
      less ``aside_bytes``, if made. ``midway``: the model's code had already begun to run.
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
        """The same error for a budget of which ``aside_bytes`` are not for the pass. ``what``: a text for these."""
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
    """A planned program was used in an unsupported way."""


@dataclass(eq=False, repr=False)
class CompiledMismatchError(ExecutionError):
    """A compiled kernel differs from the operators that it replaces (``operators``: their names), or a program with
    kernels differs from the captured one."""

    _: KW_ONLY
    operators: tuple[str, ...] = ()


@dataclass(eq=False, repr=False)
class OnlineBudgetError(LowtideError):
    """What an operator needs at once does not fit the budget of online mode.

    ``operator``: its name. ``location``: the user's ``file:line``, if known. ``needed_bytes``: what was in use and not
    evictable (the operator's inputs, tensors that cannot be recomputed) plus what was requested. ``budget_bytes``: the
    budget.
    """

    _: KW_ONLY
    operator: str = ""
    needed_bytes: int = 0
    budget_bytes: int = 0
    location: str = ""
