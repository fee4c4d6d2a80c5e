"""Training with tensors that move to a file, beside the same budget without: ``python -m benchmarks.offload_training``.

Each model trains in three processes, in turns of a few steps: plain eager, within a budget by recomputation alone, and within
the same budget with ``offload="disk"``. The file lies in the folder for temporary files; bandwidths are measured as for users.
Times are medians over all steps, as ratios to eager's, beside the predicted ones; losses are compared to the bit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.turns import all_compared, asked, keep, serve

RESULTS = Path(__file__).parent / "results" / "offload_training"
_MODULE = "benchmarks.offload_training"
_NAMES = {"eager": "eager", "recomputed": "recomputed", "moved": "moved or recomputed"}


def main() -> int:
    options = asked(_MODULE, __doc__, "gpt2,unet", "25%", RESULTS)  # a budget that recomputing alone can meet, too
    if options.train:
        return _train(*options.train)
    with tempfile.TemporaryDirectory() as cache:  # operators and the disk are measured in this run
        os.environ["LOWTIDE_CACHE_DIR"] = cache
        rows = all_compared(_MODULE, options, _NAMES, _lines)
    keep(options.output, rows, _table(rows))
    return 0


def _train(name: str, budget: str, way: str) -> int:
    import torch

    import lowtide
    from benchmarks.compare.models import COMPARED
    from lowtide.ir import simulate

    torch.manual_seed(0)
    model, args, kwargs = COMPARED[name].sample()
    facts: dict[str, Any] = {}
    if way != "eager":
        offload = "disk" if way == "moved" else None
        lowtide.rematerialize(model, args, kwargs, budget=budget, planning="wait", offload=offload)
        (plan,) = lowtide.plans(model)
        timing = simulate(plan.graph, plan.costs, plan.schedule).timing
        facts = {
            "budget_bytes": plan.budget_bytes,
            "plan_bytes": plan.peak_bytes,
            "predicted_ratio": plan.time_ns / plan.costs.total_time_ns,
            "bound_ratio": (plan.lower_bound_ns or 0) / plan.costs.total_time_ns,
            "moved_bytes": timing.offloaded_bytes + timing.fetched_bytes,
            "second_memory": str(plan.costs.second_memory),
        }

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        result = model(*args, **kwargs)
        loss: torch.Tensor = result if isinstance(result, torch.Tensor) else result.loss
        loss.backward()
        return loss.detach()

    return serve(step, lambda: model.zero_grad(set_to_none=True), facts)


def _lines(row: dict[str, Any]) -> list[str]:
    found = []
    for way, figures in row["ways"].items():
        cells = [row["model"], _NAMES[way], *_planned(row["budget"], figures), f"{figures['time_ratio']:.3f}"]
        cells.insert(4, f"{figures['peak_bytes'] / 2**20:.1f}")
        found.append(f"| {' | '.join([*cells, 'yes' if row['equal'] else 'NO'])} |")
    return found


def _planned(budget: str, figures: dict[str, Any]) -> list[str]:
    """Budget, peak, what moves and the time of the plan; empty cells without one."""
    if "plan_bytes" not in figures:
        return [""] * 4
    sizes = [f"{figures[name] / 2**20:.1f}" for name in ("budget_bytes", "plan_bytes", "moved_bytes")]
    times = f"{figures['predicted_ratio']:.3f} (bound {figures['bound_ratio']:.3f})"
    return [f"{sizes[0]} ({budget})", *sizes[1:], times]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "`python -m benchmarks.offload_training`: forward and backward passes within a budget, with a file on the local disk",
        "as second memory and without. MiB; what moves is counted there and back. Predicted times are relative to the measured",
        "times of all operators, measured ones to eager's steps.",
        "",
        "| model | how | budget | planned peak | measured peak | moved | predicted time | time / eager | losses equal |",
    ]
    return "\n".join([*lines, "|" + " --- |" * 9, *(line for row in rows for line in _lines(row))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
