"""What the online mode costs where nothing is evicted, and what it costs against plans made beforehand.

``python -m benchmarks.online_cost`` takes training passes (forward and backward) of a GPT-2, a ResNet-50, a U-Net, an LSTM
and the tree LSTM of the examples, plain and online in turn, and compares medians:

- with a budget that everything fits into: the cost of the mode itself, a step and an operator;
- at 70, 50 and 30 % of the peak that the captured program has when nothing is recomputed: the time of the online run over
  the plain one, by the rules alone and once its steps are planned, beside the overheads that ``dtr`` and ``auto`` plan for the
  same program and the same bytes.

Writes ``online_cost.json`` and ``online_cost.md`` under the results folder. The paper's prototype has a cost of 7 to 65 %
without eviction (Kirisame et al., ICLR 2021, figure 3).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from benchmarks.models import MODELS
from benchmarks.zoo import MeanSquare, Sample, loss_of, seeded, tokens
from examples.dynamic import load

RESULTS = Path(__file__).parent / "results"
SHARES = (70, 50, 30)
_ENOUGH = 1 << 36  # bytes
_LEARNING = 3  # steps, until one is planned
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class ModeCost:
    """Medians of a step in nanoseconds, nothing evicted."""

    name: str
    plain_ns: int
    online_ns: int
    operators: int

    @property
    def overhead(self) -> float:
        return self.online_ns / self.plain_ns - 1

    @property
    def operator_us(self) -> float:
        """Microseconds that the mode adds to an operator."""
        return (self.online_ns - self.plain_ns) / self.operators / 1e3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Overheads as fractions of a plain step; ``None`` where the budget was refused. ``rules`` and ``online``: measured, all
    costs of the mode included, never planned and planned; ``dtr`` and ``auto``: as planned for the captured program."""

    name: str
    share: int
    budget_bytes: int
    rules: float | None
    online: float | None
    evictions: int
    dtr: float | None
    auto: float | None


class Recurrent(nn.Module):
    """Two LSTM layers between an embedding and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layers(self.embedding(ids))
        return self.head(hidden)


def gpt2() -> Sample:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=2048, n_positions=256, n_embd=384, n_layer=6, n_head=6, use_cache=False)
    ids = tokens(8, 256, 2048)
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}


def resnet50() -> Sample:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=100))
    return model, (), {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(0, 100, (8,))}


def lstm() -> Sample:
    model = MeanSquare(Recurrent(256), lambda result: result)
    return model, (tokens(16, 96, 256),), {"target": torch.randn(16, 96, 256)}


PROGRAMS: dict[str, Callable[[], Sample]] = {
    "gpt2": seeded(gpt2),
    "resnet50": seeded(resnet50),
    "unet": MODELS["unet2d"],
    "lstm": seeded(lstm),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed steps of each kind (default: 7)")
    parser.add_argument("--programs", default=",".join(PROGRAMS), help=f"of {','.join(PROGRAMS)}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="the online mode has spent")
    torch.set_num_threads(1)
    chosen = options.programs.split(",")
    costs = [mode_cost(name, _pass(*PROGRAMS[name]()), options.rounds) for name in chosen]
    costs += [mode_cost("treelstm", _tree_step(), options.rounds), mode_cost("tiny additions", _tiny, options.rounds)]
    comparisons = [row for name in chosen for row in compare(name, options.rounds)]
    options.results.mkdir(parents=True, exist_ok=True)
    record = {"costs": [asdict(cost) for cost in costs], "comparisons": [asdict(row) for row in comparisons]}
    (options.results / "online_cost.json").write_text(json.dumps(record, indent=1) + "\n")
    text = document(costs, comparisons)
    (options.results / "online_cost.md").write_text(text)
    print(text)


def mode_cost(name: str, step: Step, rounds: int) -> ModeCost:
    session = lowtide.online(_ENOUGH)
    plain_ns, online_ns = interleaved(step, session, rounds)
    with session:
        step()
    return ModeCost(name, plain_ns, online_ns, session.statistics.operators)


def compare(name: str, rounds: int) -> list[Comparison]:
    model, args, kwargs = PROGRAMS[name]()
    peak = lowtide.plan(model, args, kwargs, budget="100%", planner="keep-all").unconstrained_peak_bytes
    step = _pass(model, args, kwargs)
    rows = []
    for share in SHARES:
        budget = peak * share // 100
        planned = [_planned(model, args, kwargs, budget, planner) for planner in ("dtr", "auto")]
        rules, _ = _measured(step, lowtide.online(budget, planning="never"), rounds)
        online, evictions = _measured(step, lowtide.online(budget, planning="wait"), rounds)
        rows.append(Comparison(name, share, budget, rules, online, evictions, *planned))
        print(rows[-1], flush=True)
    return rows


def _planned(model: nn.Module, args: Any, kwargs: Any, budget: int, planner: str) -> float | None:
    try:
        return lowtide.plan(model, args, kwargs, budget=budget, planner=planner).overhead
    except lowtide.InfeasibleBudgetError:
        return None


def _measured(step: Step, session: lowtide.online, rounds: int) -> tuple[float | None, int]:
    """The online run's overhead over the plain one, once it knows its steps, and the evictions of a step."""
    try:
        for _ in range(_LEARNING):
            with session:
                step()
        plain_ns, online_ns = interleaved(step, session, rounds)
    except lowtide.OnlineBudgetError:
        return None, session.statistics.evictions
    return online_ns / plain_ns - 1, session.statistics.evictions


def interleaved(step: Step, session: lowtide.online, rounds: int) -> tuple[int, int]:
    """Medians of plain and online steps, taken in turn after one of each; what leaving rebuilds belongs to the step."""

    def inside() -> None:
        with session:
            step()

    plain, online = [], []
    for _ in range(rounds + 1):
        plain.append(_timed(step))
        online.append(_timed(inside))
    return int(statistics.median(plain[1:])), int(statistics.median(online[1:]))


def _timed(step: Step) -> int:
    began = time.perf_counter_ns()
    step()
    return time.perf_counter_ns() - began


def _pass(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss_of(model(*args, **kwargs)).backward()

    return step


def _tree_step() -> Step:
    program = load("treelstm")(1)

    def step() -> None:
        program.step(0)

    return step


def _tiny() -> None:
    """A thousand operators that do nothing to speak of."""
    value = torch.zeros(8)
    for _ in range(1000):
        value = value + 1.0


def document(costs: Sequence[ModeCost], comparisons: Sequence[Comparison]) -> str:
    lines = [
        "# The cost of the online mode",
        "",
        f"`python -m benchmarks.online_cost`, PyTorch {torch.__version__}, one thread of {os.cpu_count()} cores; medians of",
        "steps (forward and backward) taken in turn.",
        "",
        "## Nothing evicted",
        "",
        "| program | plain | online | overhead | operators | a plain operator | the mode, an operator |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *map(_cost_row, costs),
        "",
        "## Against plans made beforehand",
        "",
        'Budgets are parts of the peak of the captured program when nothing is recomputed. Rules (`planning="never"`) and',
        'online (`planning="wait"`, from the fourth step on): time measured over plain steps, the mode\'s own cost included.',
        "`dtr` and `auto`: as planned for the same program. A plan holds all gradients at its end; the rules evict them too",
        "and rebuild on leaving, beyond the budget if they do not fit it.",
        "",
        "| program | budget | rules | online | evictions | `dtr` planned | `auto` planned |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *map(_comparison_row, comparisons),
    ]
    return "\n".join(lines) + "\n"


def _cost_row(cost: ModeCost) -> str:
    times = (
        f"{cost.plain_ns / 1e6:.1f} ms | {cost.online_ns / 1e6:.1f} ms | {_percent(cost.overhead)} | {cost.operators}"
    )
    each = f"{cost.plain_ns / cost.operators / 1e3:.1f} us | {cost.operator_us:.1f} us"
    return f"| {cost.name} | {times} | {each} |"


def _comparison_row(row: Comparison) -> str:
    overheads = (
        f"{_percent(row.rules)} | {_percent(row.online)} | {row.evictions} | {_percent(row.dtr)} | {_percent(row.auto)}"
    )
    return f"| {row.name} | {row.share} % | {overheads} |"


def _percent(fraction: float | None) -> str:
    return "refused" if fraction is None else f"{100 * fraction:.1f} %"


if __name__ == "__main__":
    main()
