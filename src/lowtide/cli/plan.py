"""``lowtide plan PACKAGE.MODULE:CALLABLE``: capture a model, measure its operators, and plan. The model is not changed.

``--curve`` plans at several budgets, down to the least that is met, and shows what each costs; ``--budget`` is then
optional. The curve is planned by auto{effort=1}, in seconds per point, unless ``--planner`` names another planner.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from lowtide.cli import fits
from lowtide.cli.options import (
    add_budget_option,
    add_chunked_loss_option,
    add_largest_option,
    add_mesh_options,
    add_offload_options,
    add_planner_options,
    given,
)
from lowtide.cli.target import sample
from lowtide.errors import PlanError
from lowtide.ir import plain_time_ns
from lowtide.planning import Plan
from lowtide.progress import progress_bar
from lowtide.report.curve import CURVE_PLANNER, CURVE_POINTS
from lowtide.units import overhead_percent

_FIGURES = ("planner", "budget_bytes", "peak_bytes", "unconstrained_peak_bytes", "time_ns")
_OF_MESH = ("link", "micro_batches", "device", "optimizer", "largest")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="PACKAGE.MODULE:CALLABLE", help="returns model, args, kwargs")
    add_budget_option(parser)
    add_planner_options(parser)
    add_offload_options(parser)
    add_chunked_loss_option(parser)
    add("--curve", action="store_true", help="show overhead against budget")
    add("--points", type=int, metavar="N", help="budgets of the curve (default: 8)")
    add("--json", action="store_true", help="print one JSON object")
    add("-o", "--output", metavar="plan.json", help="save the plan, and the curve with it")
    add_mesh_options(parser)
    add("--device", metavar="H100-80GB", help="of a mesh")
    add("--optimizer", metavar="NAME", help="of a mesh; of torch.optim (default: AdamW)")
    add_largest_option(parser)


def run(options: argparse.Namespace) -> int:
    if options.mesh:
        return _on_mesh(options)
    of_mesh = next((name for name in _OF_MESH if getattr(options, name)), None)
    if of_mesh:
        raise PlanError(f"--{of_mesh.replace('_', '-')} is that of a --mesh; for one device there is lowtide fits.")
    if not (options.budget or options.curve):
        raise PlanError('give a --budget such as "40%" or "8GiB", or --curve to see what each costs.')
    if options.points is not None and not options.curve:
        raise PlanError("--points are those of a --curve.")
    model, args, kwargs = sample(options.target)
    import lowtide

    with progress_bar() as on_progress:
        asked = given(options, "planner", "seed", "offload", "offload_budget", "chunked_loss")
        budget = options.budget or "100%"
        plan = lowtide.plan(model, args, kwargs, budget=budget, **asked, on_progress=on_progress)
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


def _on_mesh(options: argparse.Namespace) -> int:
    """Whether a model spread over a mesh of devices fits each of them. The exit code is 3 if it does not."""
    if not options.device:
        raise PlanError('a --mesh is one of devices: give --device, such as "H100-80GB".')
    if options.budget or options.curve or options.output or options.chunked_loss:
        raise PlanError(
            "the budget of a --mesh is what its --device has; --budget, --curve, --output and --chunked-loss go without."
        )
    optimizer = {"optimizer": options.optimizer} if options.optimizer else {}
    quick = "auto{effort=0}" if options.planner == "auto" else options.planner
    return fits.answer(options, device=options.device, planner=quick, **optimizer)


def _summary(plan: Plan) -> dict[str, Any]:
    """What ``--json`` prints. Without a budget, the plan is the one without recomputation."""
    bound, least = plan.lower_bound_ns, plain_time_ns(plan.graph, plan.costs)
    return {
        **{name: getattr(plan, name) for name in _FIGURES},
        "overhead_percent": overhead_percent(plan.time_ns, least),
        "lower_bound_ns": bound,
        "lower_bound_percent": None if bound is None else overhead_percent(bound, least),
        "solve_seconds": round(plan.solve_seconds, 6),
        "curve": None if plan.known_curve is None else plan.known_curve.to_json(),
    }
