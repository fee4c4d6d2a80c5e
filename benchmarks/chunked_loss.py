"""A language model whose loss is computed as a whole and in pieces: ``python -m benchmarks.chunked_loss``.

Forward and backward passes of a small GPT-2 with the vocabulary of the large ones, which returns its loss: eager, and by plans
with ``chunked_loss=`` off and on, each within the memory that it takes without recomputation and within the least that is
found. Peaks are measured above parameters. Times are medians over passes that run in turns, as ratios to eager's. Loss and
gradients are compared with eager's: the largest difference between elements of a gradient as a share of its largest element,
of all gradients the most.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from lowtide.store import write_atomically

RESULTS = Path(__file__).parent / "results" / "chunked_loss"
PLANNER = "auto{effort=1}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chunked_loss", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS, help="written as .json and .md")
    asked = parser.parse_args()
    rows = _rows(asked.tokens, asked.rounds)
    write_atomically(asked.output.with_suffix(".json"), json.dumps(rows, indent=1) + "\n")
    write_atomically(asked.output.with_suffix(".md"), _table(rows, asked.tokens))
    print(_table(rows, asked.tokens))
    return 0


def _rows(tokens: int, rounds: int) -> list[dict[str, Any]]:
    import torch

    import lowtide

    torch.manual_seed(0)
    plain = _model()
    ids = torch.randint(0, 50257, (tokens // 256, 256))
    models, rows = [plain], [{"how": "eager"}]
    for chunked in (False, True):
        for least in (False, True):
            model = copy.deepcopy(plain)
            options: dict[str, Any] = {"planner": PLANNER, "planning": "wait", "chunked_loss": chunked}
            budget: int | str = _least(model, ids, options) if least else "100%"
            (plan,) = lowtide.plans(lowtide.rematerialize(model, (ids,), budget=budget, **options))
            models.append(model)
            how = f"{'in pieces' if chunked else 'whole'}, {'least memory' if least else 'nothing recomputed'}"
            rows.append({"how": how, "plan_bytes": plan.peak_bytes, "chunked": "; ".join(map(str, plan.chunked))})
    _train(models, rows, ids, rounds)
    return rows


def _model() -> Any:
    """Six layers of width 256 below 50,257 classes, tied to the embedding, without dropout."""
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 256}
            self.model = GPT2LMHeadModel(
                GPT2Config(use_cache=False, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **sizes)
            )

        def forward(self, ids: Any) -> Any:
            return self.model(ids, labels=ids).loss

    return Loss().train()


def _least(model: Any, ids: Any, options: dict[str, Any]) -> int:
    import lowtide

    try:
        lowtide.rematerialize(model, (ids,), budget=1, **options)
    except lowtide.InfeasibleBudgetError as error:
        return error.minimum_bytes
    raise AssertionError("one byte was enough")


def _train(models: list[Any], rows: list[dict[str, Any]], ids: Any, rounds: int) -> None:
    """Put peaks, times and differences into the rows."""
    import lowtide

    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(rounds):
        for model, taken in zip(models, seconds, strict=True):
            model.zero_grad()
            begin = time.perf_counter()
            model(ids).backward()
            taken.append(time.perf_counter() - begin)
            model.zero_grad()
    expected = models[0](ids)
    expected.backward()
    for model, row, taken in zip(models, rows, seconds, strict=True):
        row["time_ratio"] = statistics.median(taken) / statistics.median(seconds[0])
        if model is not models[0]:
            loss = model(ids)
            loss.backward()
            row["loss_off"] = abs(loss.item() / expected.item() - 1)
            pairs = zip(model.parameters(), models[0].parameters(), strict=True)
            row["gradients_off"] = max(float((a.grad - b.grad).abs().max() / b.grad.abs().max()) for a, b in pairs)
            del loss
            model.zero_grad()
    models[0].zero_grad()
    for model, row in zip(models, rows, strict=True):
        row["peak_bytes"] = lowtide.measure(lambda: model(ids).backward()).peak_bytes  # noqa: B023
        model.zero_grad()


def _table(rows: list[dict[str, Any]], tokens: int) -> str:
    logits = tokens * 50257 * 4 / 2**20
    lines = [
        "`OMP_NUM_THREADS=1 python -m benchmarks.chunked_loss`: forward and backward pass of a GPT-2 of 6 layers, width 256,",
        f"with 50,257 classes, over {tokens} tokens, which returns its loss. Its logits are {logits:.0f} MiB of float32.",
        "Each plan in pieces says:",
        "",
        f"> loss {rows[-1]['chunked']}",
        "",
        "| loss | peak, MiB | time / eager | loss off by | gradients off by |",
        "|" + " --- |" * 5,
    ]
    for row in rows:
        off = [f"{row[name]:.1e}" if name in row else "" for name in ("loss_off", "gradients_off")]
        lines.append(
            f"| {row['how']} | {row['peak_bytes'] / 2**20:.1f} | {row['time_ratio']:.2f} | {off[0]} | {off[1]} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
