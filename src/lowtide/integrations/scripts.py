"""A training script as it is: run as Python runs it, and what it trains planned where it is found (``integrations.roots``)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch import nn

from lowtide.api import plans, rematerialize
from lowtide.budget import is_percentage, parse_reserve
from lowtide.errors import InfeasibleBudgetError, LowtideError, PlanError
from lowtide.integrations import roots
from lowtide.integrations.roots import Root, Roots, not_planned, refused
from lowtide.units import format_bytes, format_percent

INTERRUPTED = 130
SMALL_BYTES = 1 << 20  # a pass below this is not worth an error
_WORTH_FREEING = 0.02  # of a pass
_OVER = 0.01  # of the budget is not worth a line
_OURS = (__file__, roots.__file__, runpy.__file__, "<frozen runpy>")


def run_script(target: str, arguments: Sequence[str], *, as_module: bool) -> int:
    """Run a file, or a module by its name, as ``python`` does; returns the exit code.

    Raises ``PlanError`` where there is no such file or module, and whatever error of this package ends the script.
    """
    folder = os.getcwd() if as_module else os.path.dirname(os.path.realpath(target))
    with _process(target, arguments, folder):
        try:
            if as_module:
                runpy.run_module(target, run_name="__main__", alter_sys=True)
            else:
                if not os.path.exists(target):
                    raise PlanError(f"there is no script {target}; give a file, or a module with -m.")
                runpy.run_path(target, run_name="__main__")
        except LowtideError:
            raise
        except SystemExit as ended:
            if ended.code is None or isinstance(ended.code, int):
                return ended.code or 0
            print(ended.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
            return 1
        except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort
            own = _without_our_frames(error.__traceback__)
            if own is None and isinstance(error, ImportError):
                raise PlanError(f"{target} cannot be run: {error}.") from None
            sys.excepthook(type(error), error.with_traceback(own), own)
            return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextlib.contextmanager
def _process(target: str, arguments: Sequence[str], folder: str) -> Iterator[None]:
    """Inside, arguments and the first folder of the path are those of the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _OURS:
            entries.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


def planned_roots(settings: Mapping[str, Any], skip: Collection[str], say: Callable[[str], None]) -> Roots:
    """Inside, what a script trains is rematerialized with these ``settings``, at its first call; what cannot be runs as it is.

    ``skip``: names of classes to leave alone. ``say`` is told of each model what becomes of it. A budget that is too small for
    one is the script's ``InfeasibleBudgetError``: one in percent where a backward pass begins, since the call may only ask for
    shapes, and not for what is little.
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
    """Leave a root without a plan whose budget in percent is too small for a call. Raises the error of one in bytes, and where
    the call cannot begin again."""
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
    elif freed < _WORTH_FREEING * whole:
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
    """What to do where passes took more than the budget beside ``reserve``, which counts the model alone; else nothing."""
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
    """A model's row of the summary, below ``HEADER``."""
    plan = root.plan
    calls = f"{root.planned_calls} of {root.calls}"
    measured = "-" if root.measured_bytes is None else format_bytes(root.measured_bytes)
    if plan is None:
        return root.name, "-", "-", "-", measured, "-", str(root.plans), calls
    amounts = map(format_bytes, (plan.unconstrained_peak_bytes, plan.budget_bytes, plan.peak_bytes))
    return root.name, *amounts, measured, format_percent(plan.overhead), str(root.plans), calls
