"""What a planned call takes beside its operators: ``OMP_NUM_THREADS=1 python -m benchmarks.call_cost``.

Stacks of small blocks (a norm, two linear layers, GELU, dropout, a sum; 256 rows of 32 numbers) run forward and backward,
plainly and with lowtide at 100 % of their peak, where nothing is recomputed, in turn. What the second takes more is the
machinery: comparing the model with the one that was planned, and the nodes of autograd in Python. Large operators hide it,
small ones do not. Times are of the thread alone. ``results/call_cost.md`` has a row per stack.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import lowtide

RESULTS = Path(__file__).parent / "results"
BLOCKS = (1, 6, 24)
_WIDTH, _ROWS, _WARM_UPS = 32, 256, 20


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(_WIDTH), nn.Dropout(0.1)
        self.wide, self.narrow = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm(x)))))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.call_cost", description=__doc__.partition(":")[0])
    parser.add_argument("--rounds", type=int, default=300, help="timed passes with each (default: 300)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = [
        "# What a planned call takes beside its operators",
        "",
        "`OMP_NUM_THREADS=1 python -m benchmarks.call_cost`: its first lines tell what is measured.",
        "",
        "| modules | parameters | operators | plain, us | with lowtide, us | more, us | per module, us |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [_row(blocks, options.rounds) for blocks in BLOCKS]
    text = "\n".join(lines) + "\n"
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "call_cost.md").write_text(text)
    print(text)
    return 0


def _row(blocks: int, rounds: int) -> str:
    torch.manual_seed(0)
    plain, x = nn.Sequential(*(_Block() for _ in range(blocks))), torch.randn(_ROWS, _WIDTH)
    own = lowtide.rematerialize(copy.deepcopy(plain), (x,), budget="100%", planning="wait")
    times: list[list[float]] = [[], []]
    for number in range(-_WARM_UPS, rounds):
        for model, taken in zip((plain, own), times, strict=True):
            seconds = _pass_seconds(model, x)
            if number >= 0:
                taken.append(seconds)
    plain_us, own_us = (1e6 * statistics.median(taken) for taken in times)
    modules, parameters = len([*plain.modules()]), len([*plain.parameters()])
    (plan,) = lowtide.plans(own)
    cells = modules, parameters, len(plan.graph.ops), *map(round, (plain_us, own_us, own_us - plain_us))
    return f"| {' | '.join(map(str, cells))} | {(own_us - plain_us) / modules:.0f} |"


def _pass_seconds(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    began = time.thread_time()
    model(x).sum().backward()
    return time.thread_time() - began


if __name__ == "__main__":
    sys.exit(main())
