"""Train PyTorch models inside a memory budget.

``rematerialize(model, args, budget="8GiB")`` is the main entry point. Other functions plan without running, undo it,
and measure.
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
    from lowtide.api import accumulating, plan, plans, rematerialize, rematerialize_stages, restore, wait
    from lowtide.batches import MaxBatch, max_batch
    from lowtide.dynamic.context import online
    from lowtide.memory.measurement import Measurement
    from lowtide.memory.meter import measure
    from lowtide.planning import Plan
    from lowtide.runtime.checked import checked
    from lowtide.whole_step import Fit, fits


_LAZY = {
    "lowtide.api": ("accumulating", "plan", "plans", "rematerialize", "rematerialize_stages", "restore", "wait"),
    "lowtide.batches": ("MaxBatch", "max_batch"),
    "lowtide.dynamic.context": ("online",),
    "lowtide.memory.measurement": ("Measurement",),
    "lowtide.memory.meter": ("measure",),
    "lowtide.planning": ("Plan",),
    "lowtide.runtime.checked": ("checked",),
    "lowtide.whole_step": ("Fit", "fits"),
}

__all__ = [
    "CaptureError", "CompiledMismatchError", "CostError", "ExecutionError", "Fit", "InfeasibleBudgetError", "LowtideError",
    "MaxBatch", "Measurement", "NativeCoreError", "OnlineBudgetError", "Plan", "PlanError", "ScheduleError",
    "accumulating", "checked", "fits", "max_batch", "measure", "online", "plan", "plans", "rematerialize",
    "rematerialize_stages", "restore", "wait",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _LAZY.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
