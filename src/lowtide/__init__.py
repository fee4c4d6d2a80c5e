"""Train PyTorch models inside a memory budget.

``rematerialize(model, args, budget="8GiB")`` is the one line; the other names plan without running, undo it, and measure.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lowtide.errors import (
    CaptureError,
    CompiledMismatchError,
    CostError,
    ExecutionError,
    InfeasibleBudgetError,
    LowtideError,
    NativeCoreError,
    OnlineBudgetError,
    PlanError,
    ScheduleError,
)
from lowtide.version import __version__ as __version__

if TYPE_CHECKING:
    from lowtide.api import accumulating, plan, plans, rematerialize, restore, wait
    from lowtide.batches import MaxBatch, max_batch
    from lowtide.dynamic.context import online
    from lowtide.memory.measurement import Measurement
    from lowtide.memory.meter import measure
    from lowtide.planning import Plan
    from lowtide.runtime.checked import checked
    from lowtide.whole_step import Fit, fits


_LAZY = {
    "rematerialize": "lowtide.api",
    "accumulating": "lowtide.api",
    "restore": "lowtide.api",
    "plans": "lowtide.api",
    "plan": "lowtide.api",
    "wait": "lowtide.api",
    "max_batch": "lowtide.batches",
    "MaxBatch": "lowtide.batches",
    "online": "lowtide.dynamic.context",
    "Plan": "lowtide.planning",
    "checked": "lowtide.runtime.checked",
    "measure": "lowtide.memory.meter",
    "Measurement": "lowtide.memory.measurement",
    "Fit": "lowtide.whole_step",
    "fits": "lowtide.whole_step",
}

__all__ = [
    "CaptureError",
    "CompiledMismatchError",
    "CostError",
    "ExecutionError",
    "Fit",
    "InfeasibleBudgetError",
    "LowtideError",
    "MaxBatch",
    "Measurement",
    "NativeCoreError",
    "OnlineBudgetError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "accumulating",
    "checked",
    "fits",
    "max_batch",
    "measure",
    "online",
    "plan",
    "plans",
    "rematerialize",
    "restore",
    "wait",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
