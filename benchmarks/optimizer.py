"""Whole steps with the optimizer after and inside of the backward pass, side by side: ``python -m benchmarks.optimizer``.

A step is ``zero_grad``, forward, backward and ``step``. Each model trains in three processes, in turns of a few steps: plain
eager, rematerialized with the optimizer's step after the backward pass, and with ``optimizer=``. Both plans have the same
budget in bytes, a share of the peak that the model has without rematerialization and with all gradients. Peaks are what a
step takes above parameters and optimizer state; times are medians over all steps, as ratios to eager's. Losses are compared to
the bit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.turns import all_compared, asked, keep, serve

RESULTS = Path(__file__).parent / "results" / "optimizer"
MODELS = ("gpt2", "resnet50")
_MODULE = "benchmarks.optimizer"
WAYS = ("eager", "after", "inside")


def main() -> int:
    options = asked(_MODULE, __doc__, ",".join(MODELS), "100%,80%", RESULTS)
    if options.train:
        return _train(*options.train)
    rows = all_compared(_MODULE, options, WAYS, _lines)
    keep(options.output, rows, _table(rows))
    return 0


def _train(name: str, budget: str, way: str) -> int:
    """Steps on demand: a line of input is a turn, and one of output tells of it."""
    import torch

    import lowtide
    from lowtide.budget import parse_budget

    torch.manual_seed(0)
    model, kwargs, optimizer = _models()[name]()
    facts: dict[str, Any] = {"budget_bytes": None, "plan_bytes": None, "overhead": 0.0}
    if way != "eager":
        plain = lowtide.plan(model, (), kwargs, budget="100%", planner="keep-all")
        limit = parse_budget(budget, plain.unconstrained_peak_bytes)
        inside = optimizer if way == "inside" else None
        lowtide.rematerialize(model, (), kwargs, budget=limit, planning="wait", optimizer=inside)
        (plan,) = lowtide.plans(model)
        facts = {"budget_bytes": limit, "plan_bytes": plan.peak_bytes, "overhead": plan.overhead}
    losses: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        result = model(**kwargs)  # and its logits, which a plan counts to the end
        losses[:] = [result.loss]
        losses[0].backward()
        optimizer.step()
        return losses[0]

    def clear() -> None:
        optimizer.zero_grad()
        losses.clear()

    facts["parameter_bytes"] = sum(parameter.nbytes for parameter in model.parameters())
    return serve(step, clear, facts)


def _models() -> dict[str, Any]:
    from benchmarks.zoo import classes, image, tokens

    def gpt2() -> Any:
        """GPT-2 of 124 million parameters, 12 layers, a sequence of 256, dropout 0.1, under AdamW."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        model = GPT2LMHeadModel(GPT2Config(use_cache=False)).train()
        ids = tokens(1, 256, 50257)
        return model, {"input_ids": ids, "labels": ids}, torch.optim.AdamW(model.parameters(), lr=1e-4)

    def resnet50() -> Any:
        """ResNet-50 for 1,000 classes, batch 8, 224 x 224 pixels, under SGD with momentum."""
        import torch
        from transformers import ResNetConfig, ResNetForImageClassification

        model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
        return model, {"pixel_values": image(8, 224), "labels": classes(8, 1000)}, optimizer

    return {"gpt2": gpt2, "resnet50": resnet50}


def _lines(row: dict[str, Any]) -> list[str]:
    names = {"eager": "eager", "after": "lowtide, step after it", "inside": "lowtide, `optimizer=`"}
    found = []
    for way, figures in row["ways"].items():
        budget = "" if figures["budget_bytes"] is None else f"{figures['budget_bytes'] / 2**20:.1f} ({row['budget']})"
        planned = "" if figures["plan_bytes"] is None else f"{figures['plan_bytes'] / 2**20:.1f}"
        found.append(
            f"| {row['model']} | {names[way]} | {budget} | {planned} | {figures['peak_bytes'] / 2**20:.1f} "
            f"| {figures['time_ratio']:.2f} | {'yes' if row['equal'] else 'NO'} |"
        )
    return found


def _table(rows: list[dict[str, Any]]) -> str:
    sizes = ", ".join(
        f"{name} {size / 2**20:.1f}"
        for name, size in {row["model"]: row["ways"]["eager"]["parameter_bytes"] for row in rows}.items()
    )
    lines = [
        "`OMP_NUM_THREADS=1 python -m benchmarks.optimizer`: whole steps (`zero_grad`, forward, backward, `step`). Budget and",
        "planned peak are of the forward and backward pass; the peak of a step is above parameters and optimizer state.",
        f"MiB; parameters, and so gradients, take: {sizes}.",
        "",
        "| model | how | budget | planned | peak of a step | time / eager | losses equal |",
    ]
    return "\n".join([*lines, "|" + " --- |" * 7, *(line for row in rows for line in _lines(row))]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
