"""``lowtide demo``: train a byte-level GPT-2 with plain PyTorch and with lowtide inside a budget, and compare.

The text is the standard library's sources, and dropout is on. The output shows losses, measured and predicted peaks,
and step times. It saves a plot of memory over the step, and a map of the addresses that an arena would give the
tensors. The exit code is 1 if losses differ or a peak exceeds the budget.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import PlanError
from lowtide.stage_times import itemised, stage_seconds
from lowtide.store import write_atomically
from lowtide.units import format_bytes, format_percent, format_time

_FEW_STEPS = 12  # with fewer steps, all but the first are measured

if TYPE_CHECKING:
    from lowtide.demo.training import Training
    from lowtide.planning import Plan


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget", default="40%", help='for instance "40%%" (the default) or "120MiB"')
    add("--steps", type=int, default=24, help="training steps (default: 24)")
    add("--layers", type=int, default=6, help="layers of the model (default: 6)")
    add("--batch", type=int, default=4, help="sequences per step (default: 4)")
    add("--device", default="cpu", help='"cpu" (the default), "cuda" or another accelerator')
    add("--planner", default="auto", metavar="SPEC", help="see lowtide planners (default: auto)")
    add("--output", default="demo", metavar="FOLDER", help="for memory.png, plan.map.svg and result.json")


def run(options: argparse.Namespace) -> int:
    if min(options.steps, options.layers, options.batch) < 1 or options.steps < 3:
        raise PlanError("the demo takes at least 3 steps, 1 layer and 1 sequence; lower values make no comparison.")
    from lowtide.demo.training import memory_figure

    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    plain, planned, plan, start_seconds = _train(options)
    result = {"device": plan.costs.device, **_result(plain, planned, plan, start_seconds)}
    _print_result(result)
    write_atomically(folder / "result.json", json.dumps(result, indent=1) + "\n")
    figure = memory_figure({run.name: run.measurements[-1] for run in (plain, planned)}, plan)
    figure.savefig(folder / "memory.png", dpi=150)
    plan.report(folder / "plan.map.svg")
    print(f"plots       {folder / 'memory.png'}, {folder / 'plan.map.svg'}")
    return 0 if result["losses_equal"] and result["parameters_equal"] and result["within_budget"] else 1


def _train(options: argparse.Namespace) -> tuple[Training, Training, Plan, float]:
    """Both trainings, the plan, and the seconds until training could start."""
    import lowtide
    from lowtide.demo.gpt2 import Shape, build_model, draw_batches, load_corpus
    from lowtide.demo.training import Training, repeat_bits, train_side_by_side
    from lowtide.device import find

    shape, device = Shape(layers=options.layers, batch=options.batch), find(options.device).device
    repeat_bits(device)
    model = build_model(shape).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"GPT-2, {shape.layers} layers, width {shape.width}, context {shape.context}, dropout {shape.dropout}, "
        f"{parameters:,} parameters; batches of {shape.batch}",
        flush=True,
    )
    batches = [batch.to(device) for batch in draw_batches(load_corpus(), shape, options.steps)]
    plain, planned = Training("plain PyTorch", copy.deepcopy(model)), Training("lowtide", model)
    print("capturing, measuring operators, making a first plan ...", flush=True)
    start = time.perf_counter()
    sample = {"input_ids": batches[0], "labels": batches[0]}
    with stage_seconds() as taken:
        lowtide.rematerialize(model, (), sample, budget=options.budget, planner=options.planner)
    start_seconds = time.perf_counter() - start
    (plan,) = lowtide.plans(model)
    overhead = format_percent(plan.overhead)
    print(f"training starts after {start_seconds:.1f} s ({itemised(taken)}); overhead so far {overhead}\n")
    print(f"training both for {options.steps} steps ...\n", flush=True)
    print("step  loss, plain           loss, lowtide", flush=True)
    early = options.steps // 4 - 1 if options.steps >= _FEW_STEPS else 0
    for step in train_side_by_side([plain, planned], batches):
        if step % max(options.steps // 6, 1) == 0 or step == options.steps - 1:
            print(f"{step:>4}  {plain.losses[step]:<20.17g}  {planned.losses[step]:.17g}", flush=True)
        if step == early:
            lowtide.wait(model)
            (plan,) = lowtide.plans(model)
            print(f"\nthe search has ended; steps are timed and measured from here on\n\n{plan}\n", flush=True)
            plain.settle()
            planned.settle()
    return plain, planned, plan, start_seconds


def _result(plain: Training, planned: Training, plan: Plan, start_seconds: float) -> dict[str, Any]:
    from lowtide.demo.training import same_parameters

    plain_ns, planned_ns = (int(statistics.median(run.step_ns)) for run in (plain, planned))
    return {
        "steps": len(plain.losses),
        "losses_equal": plain.losses == planned.losses,
        "parameters_equal": same_parameters(plain.model, planned.model),
        "plain_peak_bytes": plain.peak_bytes,
        "unconstrained_peak_bytes": plan.unconstrained_peak_bytes,
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.peak_bytes,
        "measured_peak_bytes": planned.peak_bytes,
        "within_budget": max(planned.peak_bytes, planned.earlier_peak_bytes) <= plan.budget_bytes,
        "plain_step_ns": plain_ns,
        "step_ns": planned_ns,
        "overhead_measured": planned_ns / plain_ns - 1,
        "overhead_predicted": plan.overhead,
        "start_seconds": start_seconds,
        "solve_seconds": plan.solve_seconds,
        "plain_losses": plain.losses,
        "losses": planned.losses,
    }


def _print_result(result: dict[str, Any]) -> None:
    same = {key: "equal to the bit" if result[key] else "DIFFERENT" for key in ("losses_equal", "parameters_equal")}
    share = format_percent(result["measured_peak_bytes"] / result["plain_peak_bytes"])
    plain, peak, predicted, budget = (
        format_bytes(result[f"{key}_bytes"]) for key in ("plain_peak", "measured_peak", "predicted_peak", "budget")
    )
    print(f"\nlosses      {same['losses_equal']} over {result['steps']} steps")
    print(f"parameters  {same['parameters_equal']} at the end")
    print(f"peak        plain {plain}; lowtide {peak} ({share} of plain)")
    print(f"            predicted {predicted}, budget {budget}: {'kept' if result['within_budget'] else 'BROKEN'}")
    times = f"plain {format_time(result['plain_step_ns'])}, lowtide {format_time(result['step_ns'])}"
    overheads = [format_percent(result[f"overhead_{kind}"]) for kind in ("measured", "predicted")]
    print(f"step        {times} (medians, taken in turn): overhead {overheads[0]}, predicted {overheads[1]}")
