"""``lowtide plan PACKAGE.MODULE:CALLABLE``: capture a model, measure its operators, and plan. The model is not changed.

``--curve`` plans at several budgets, down to the least that is met, and shows what each costs; a ``--budget`` is not needed
then. The curve is planned by auto{effort=1}, in seconds per point, unless ``--planner`` names another one.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from lowtide.cli.options import add_budget_option, add_chunked_loss_option, add_offload_options, add_planner_options
from lowtide.errors import LowtideError, PlanError
from lowtide.ir import plain_time_ns
from lowtide.planning import Plan
from lowtide.progress import progress_bar
from lowtide.report.curve import CURVE_PLANNER, CURVE_POINTS
from lowtide.units import overhead_percent

_EXAMPLE = 'for instance "mypackage.models:build", where build() returns (model, args, kwargs)'


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="PACKAGE.MODULE:CALLABLE", help="returns model, args, kwargs")
    add_budget_option(parser)
    add_planner_options(parser)
    add_offload_options(parser)
    add_chunked_loss_option(parser)
    parser.add_argument("--curve", action="store_true", help="show overhead against budget")
    parser.add_argument("--points", type=int, metavar="N", help="budgets of the curve (default: 8)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("-o", "--output", metavar="plan.json", help="save the plan, and the curve with it")
    parser.add_argument(
        "--mesh", metavar="dp=8,tp=4", help="of a cluster that is not there: what one of its ranks takes"
    )
    parser.add_argument("--link", metavar="NAME|DIM=NAME,..", help="between the ranks of a mesh, such as nvlink")
    parser.add_argument("--device", metavar="H100-80GB", help="of a mesh")
    parser.add_argument("--optimizer", metavar="NAME", help="of a mesh; of torch.optim (default: AdamW)")


def run(options: argparse.Namespace) -> int:
    of_mesh = {name: getattr(options, name) for name in ("link", "device", "optimizer") if getattr(options, name)}
    if options.mesh:
        return _on_mesh(options, of_mesh)
    if of_mesh:
        raise PlanError(f"--{next(iter(of_mesh))} is that of a --mesh; for one device there is lowtide fits.")
    if not (options.budget or options.curve):
        raise PlanError('give a --budget such as "40%" or "8GiB", or --curve to see what each costs.')
    if options.points is not None and not options.curve:
        raise PlanError("--points are those of a --curve.")
    model, args, kwargs = sample(options.target)
    import lowtide

    with progress_bar() as on_progress:
        plan = lowtide.plan(
            model,
            args,
            kwargs,
            budget=options.budget or "100%",
            planner=options.planner,
            seed=options.seed,
            offload=options.offload,
            offload_budget=options.offload_budget,
            chunked_loss=options.chunked_loss,
            on_progress=on_progress,
        )
        if options.curve:
            planner = CURVE_PLANNER if options.planner == "auto" else options.planner
            points = CURVE_POINTS if options.points is None else options.points
            plan = plan.with_curve(points=points, planner=planner, on_progress=on_progress)
    if options.output:
        plan.save(options.output)
        print(f"plan written to {options.output}", file=sys.stderr)
    shown: list[object] = [plan] if options.budget else []
    shown += [plan.known_curve] if plan.known_curve is not None else []
    print(json.dumps(_summary(plan)) if options.json else "\n\n".join(map(str, shown)))
    return 0


def _on_mesh(options: argparse.Namespace, given: dict[str, str]) -> int:
    """Whether a model that is spread over a mesh of devices fits each of them; 3 where it does not."""
    import lowtide
    from lowtide.whole_step.mesh import parse_mesh, pretended

    if "device" not in given:
        raise PlanError('a --mesh is one of devices: give --device, such as "H100-80GB".')
    if options.budget or options.curve or options.output:
        raise PlanError("the budget of a --mesh is what its --device has; --budget, --curve and --output go without.")
    with pretended(parse_mesh(options.mesh)) as mesh, progress_bar() as on_progress:
        model, args, kwargs = sample(options.target, mesh)
        quick = "auto{effort=0}" if options.planner == "auto" else options.planner
        offload = {"offload": options.offload, "offload_budget": options.offload_budget}
        facts = {**given, **offload, "planner": quick, "seed": options.seed, "on_progress": on_progress}
        fit = lowtide.fits(model, args, kwargs, mesh=options.mesh, **facts)
    print(json.dumps(fit.to_json()) if options.json else fit)
    return 0 if fit else 3


def _summary(plan: Plan) -> dict[str, Any]:
    """What ``--json`` prints; without a budget the plan is the one that recomputes nothing."""
    bound, least = plan.lower_bound_ns, plain_time_ns(plan.graph, plan.costs)
    return {
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "unconstrained_peak_bytes": plan.unconstrained_peak_bytes,
        "time_ns": plan.time_ns,
        "overhead_percent": overhead_percent(plan.time_ns, least),
        "lower_bound_ns": bound,
        "lower_bound_percent": None if bound is None else overhead_percent(bound, least),
        "solve_seconds": round(plan.solve_seconds, 6),
        "curve": None if plan.known_curve is None else plan.known_curve.to_json(),
    }


def sample(target: str, *given: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the user's callable, with what it is ``given`` if it takes that; the current folder is importable. Raises
    ``PlanError`` for anything but a sample."""
    from torch import nn

    result = call(target, *given)
    if not isinstance(result, tuple) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        returned = type(result).__name__
        if isinstance(result, tuple):
            returned = f"({', '.join(type(item).__name__ for item in result)})"
        raise PlanError(f"{target} returned {returned}, not a tuple (model, args, kwargs); {_EXAMPLE}.")
    model, args, kwargs = result if len(result) == 3 else (*result, {})
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise PlanError(f"{target} returned args and kwargs of types {kinds}; they are a tuple and a dict.")
    return model, tuple(args), kwargs


def call(target: str, *given: Any) -> Any:
    """What the user's callable returns. Raises ``PlanError`` where it cannot be found or fails."""
    try:
        function = find_callable(target)
        takes = len(inspect.signature(function).parameters) >= len(given)
        return function(*given) if takes else function()
    except LowtideError:
        raise
    except Exception as error:
        raise PlanError(f"{target} raised {type(error).__name__}: {error}.") from error


def find_callable(target: str) -> Callable[[], Any]:
    """The callable that ``PACKAGE.MODULE:CALLABLE`` or ``FILE.py:CALLABLE`` names."""
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise PlanError(f"{target!r} does not name a callable; write PACKAGE.MODULE:CALLABLE, {_EXAMPLE}.")
    folder = os.getcwd()
    if module_name.endswith(".py"):
        folder, file = os.path.split(os.path.abspath(module_name))
        module_name = file.removesuffix(".py")
        if not os.path.isfile(os.path.join(folder, file)):
            raise PlanError(f"cannot load {target}: there is no file {os.path.join(folder, file)}.")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = pkgutil.resolve_name(f"{module_name}:{path}")
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanError(f"cannot load {target}: {error}; {_EXAMPLE}.") from error
    if not callable(found):
        raise PlanError(f"{target} is a {type(found).__name__}, not a callable; {_EXAMPLE}.")
    result: Callable[[], Any] = found
    return result
