"""Training over many lengths: ``python -m benchmarks.shapes``.

GPT-2 takes steps on batches of random lengths, dropout on, three ways in one process: plain; under lowtide's default settings
from an empty cache, everything that planning takes included; and with a plan for each length that was made beforehand. Every
step under lowtide is compared with plain PyTorch's, gradients included, and the peak of each length with the budget (neither
is in the times).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "shapes"


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWTIDE_CACHE_DIR"] = folder
        found = run(options)
    RESULTS.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(document(found))
    print(document(found))
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All three ways, a step of each in turn."""
    import torch

    import lowtide
    from lowtide.integrations.passes import latest_plans

    torch.set_num_threads(options.threads)
    plain, call = _model(options)
    ours, beforehand = copy.deepcopy(plain), copy.deepcopy(plain)
    drawn = random.Random(0)
    lengths = drawn.sample(range(options.longest // 4, options.longest + 1), options.lengths)
    order = [drawn.choice(lengths) for _ in range(options.steps)]
    order[: len(lengths)] = lengths[: options.steps]
    first = time.perf_counter()
    lowtide.rematerialize(ours, (), call(options.longest), budget=options.budget)
    prepare = time.perf_counter() - first
    lowtide.rematerialize(
        beforehand,
        (),
        call(options.longest),
        budget=options.budget,
        dynamic=False,
        planning="wait",
        planner=options.planner,
    )
    for length in sorted(set(order), reverse=True):
        beforehand(**call(length)).loss.backward()
    rows = []
    seen: set[int] = set()
    for number, length in enumerate(order):
        batch = call(length)
        eager = _step(plain, batch, number)
        row = {"length": length, "new": length not in seen, "plain": eager}
        row["ours"], row["beforehand"] = _step(ours, batch, number), _step(beforehand, batch, number)
        for model in (ours, beforehand):
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad), f"another gradient at step {number}"
        if length not in seen:
            ours.zero_grad(set_to_none=True)
            peak = lowtide.measure(lambda batch=batch: ours(**batch).loss.backward()).peak_bytes
            (plan,) = latest_plans(ours)
            assert peak <= plan.budget_bytes, f"{peak} bytes, over the budget of {plan.budget_bytes}"
        seen.add(length)
        rows.append(row)
    lowtide.restore(ours)
    setting = {name: getattr(options, name) for name in ("layers", "width", "longest", "budget", "threads", "planner")}
    return {"setting": setting | {"torch": torch.__version__}, "prepare": prepare, "steps": rows}


def _model(options: argparse.Namespace) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    size = {"n_layer": options.layers, "n_embd": options.width, "n_head": 8, "vocab_size": 2000}
    model = GPT2LMHeadModel(GPT2Config(**size, n_positions=options.longest, bos_token_id=0, eos_token_id=0)).train()

    def call(length: int) -> dict[str, Any]:
        tokens = torch.randint(0, 2000, (4, length), generator=torch.Generator().manual_seed(length))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return model, call


def _step(model: Any, batch: dict[str, Any], seed: int) -> float:
    import torch

    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    model(**batch).loss.backward()
    return time.perf_counter() - began


def document(found: dict[str, Any]) -> str:
    """The Markdown page."""
    steps, setting = found["steps"], found["setting"]
    totals = {way: sum(row[way] for row in steps) for way in ("plain", "ours", "beforehand")}
    new = [row for row in steps if row["new"]][2:]
    extra = [row["ours"] - row["beforehand"] for row in new]
    return "\n".join(
        [
            "# Training over many lengths",
            "",
            "Made by `python -m benchmarks.shapes`; " + ", ".join(f"{k} {v}" for k, v in setting.items()) + ".",
            "",
            f"{len(steps)} steps over {sum(row['new'] for row in steps)} lengths; every gradient equal to plain PyTorch's",
            "to the bit, every peak within the budget. Seconds of wall time.",
            "",
            "| | total | over plans made beforehand |",
            "|---|---|---|",
            *(f"| {way} | {totals[way]:.1f} | {totals[way] / totals['beforehand']:.3f} |" for way in totals),
            "",
            f"`rematerialize` returned after {found['prepare']:.1f} s. The third length, captured with symbolic sizes, "
            f"took {[row for row in steps if row['new']][1]['ours']:.1f} s; each later one {statistics.median(extra):.2f} s "
            f"more than under a plan made beforehand (median; most {max(extra):.2f} s), where its step takes "
            f"{statistics.median(row['beforehand'] for row in new):.2f} s.",
            "",
        ]
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--lengths", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--budget", default="40%")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--planner", default="auto{effort=1}", help="of the plans that are made beforehand")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
