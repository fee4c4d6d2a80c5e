"""What a training script trains, planned where it is found (``integrations.roots``), and told of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from lowtide.api import plans, rematerialize
from lowtide.budget import is_percentage, parse_reserve
from lowtide.errors import InfeasibleBudgetError
from lowtide.integrations.roots import WORTH_FREEING, Root, Roots, not_planned, refused
from lowtide.units import format_bytes, format_percent

SMALL_BYTES = 1 << 20  # a pass below this is not worth an error
_OVER = 0.01  # of the budget is not worth a line


def planned_roots(settings: Mapping[str, Any], skip: Collection[str], say: Callable[[str], None]) -> Roots:
    """A context that rematerializes what a script trains, with these ``settings``, at its first call; models that
    cannot be planned run as they are.

    ``skip``: names of classes to leave alone. ``say`` gets a text on each model. If the budget is too small for a
    model, the script gets an ``InfeasibleBudgetError``. For a budget in percent it is raised when a backward pass
    begins, since the call may only ask for shapes, and not for small passes.
    """

    told: set[str] = set()

    def tell(line: str) -> None:
        if line not in told:  # of a model that is asked about again
            told.add(line)
            say(line)

    def infeasible(root: Root, error: InfeasibleBudgetError) -> None:
        _too_small(root, error, settings["budget"])
        tell(f"{root.name} runs without a plan: {root.outside}")

    def found(root: Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reason = f"{type(module).__name__} was named by --skip" if type(module).__name__ in skip else ""
        root.outside = reason or not_planned(module)
        if not root.outside:
            _plan(root, module, args, kwargs, settings)
        tell(f"{root.name} {f'runs without a plan: {root.outside}' if root.outside else _promise(module)}")

    return Roots(found, infeasible=infeasible)


def _promise(module: nn.Module) -> str:
    made = plans(module)
    if not made:
        return "is no single program: what becomes of it is found out as it runs"
    peak, whole = format_bytes(made[0].peak_bytes), format_bytes(made[0].unconstrained_peak_bytes)
    return f"is planned: a pass takes {peak} instead of {whole}, {format_percent(made[0].overhead)} longer"


def _plan(
    root: Root, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Mapping[str, Any]
) -> None:
    compiler = settings.get("compiler") or ("inductor" if root.compiled else "eager")
    try:
        with refused(root):
            rematerialize(module, args, kwargs, **{**settings, "compiler": compiler})
    except InfeasibleBudgetError as error:
        _too_small(root, error, settings["budget"])


def _too_small(root: Root, error: InfeasibleBudgetError, budget: Any) -> None:
    """Let a root run without a plan if its budget in percent is too small for a call. Raises the error for a budget in
    bytes, or if the call cannot start over."""
    told = f"{root.name}: {error} (lowtide run --skip {root.kind} leaves this model alone)"
    ends = dataclasses.replace(error, message=told)
    if error.midway or not is_percentage(budget):
        raise ends from None
    least, whole = error.minimum_bytes, error.plan.unconstrained_peak_bytes if error.plan else 0
    freed = whole - error.plan.peak_bytes if error.plan else 0
    root.asks_again, root.too_small = True, None
    root.outside = f"it needs {format_bytes(least)}, which is more than {budget} of its pass"
    if least < SMALL_BYTES:
        root.outside += ", but little"
    elif freed < WORTH_FREEING * whole:
        root.outside = f"plans could free no more than {format_bytes(freed)} of the {format_bytes(whole)} of its pass"
    else:
        root.outside += ": its backward pass ends the script"
        root.too_small = ends


def facts(root: Root) -> dict[str, Any]:
    """A model's part of the summary, as plain data."""
    plan = root.plan
    return {
        "model": root.name,
        "budget_bytes": plan and plan.budget_bytes,
        "planned_peak_bytes": plan and plan.peak_bytes,
        "unconstrained_peak_bytes": plan and plan.unconstrained_peak_bytes,
        "overhead_percent": plan and 100 * plan.overhead,
        "plans": root.plans,
        "planned_calls": root.planned_calls,
        "calls": root.calls,
        "measured_peak_bytes": root.measured_bytes,
        "in_parts": root.in_parts,
        "outside": root.outside,
    }


def beyond(root: Root, reserve: int | str) -> str:
    """Advice if passes took more than the budget plus ``reserve``, since the budget counts the model alone; else
    empty."""
    plan = root.plan
    if plan is None or root.in_parts or root.measured_bytes is None or root.planned_calls == 0:
        return ""
    room = root.measured_bytes - plan.budget_bytes
    over = room - parse_reserve(reserve, plan.unconstrained_peak_bytes)
    if over <= _OVER * plan.budget_bytes:
        return ""
    unit = "MiB" if room >= 16 << 20 else "KiB"
    return (
        f"{root.name}: passes took {format_bytes(over)} more than the budget, which is of the model alone: to count what the "
        f"script does between (a loss), leave room with --reserve {-(-room // (1 << 20 if unit == 'MiB' else 1 << 10))}{unit}"
    )


HEADER = ("model", "without", "budget", "planned", "measured", "overhead", "plans", "calls by a plan")


def cells(root: Root) -> tuple[str, ...]:
    """A model's row of the summary, for ``HEADER``."""
    plan = root.plan
    calls = f"{root.planned_calls} of {root.calls}"
    measured = "-" if root.measured_bytes is None else format_bytes(root.measured_bytes)
    if plan is None:
        return root.name, "-", "-", "-", measured, "-", str(root.plans), calls
    amounts = map(format_bytes, (plan.unconstrained_peak_bytes, plan.budget_bytes, plan.peak_bytes))
    return root.name, *amounts, measured, format_percent(plan.overhead), str(root.plans), calls
