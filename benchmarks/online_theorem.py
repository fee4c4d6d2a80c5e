"""Online eviction on linear networks: ``python -m benchmarks.online_theorem`` (about half a minute).

A feed-forward network of N equal layers, forward and backward, in a budget of twice the root of N activations (rounded up).
The theorem of dynamic tensor rematerialization (Kirisame et al., ICLR 2021, arXiv 2006.09616, theorem 3.1): with the
heuristic e* and banishing, O(N) operators run. Here they are counted for N = 2^6 ... 2^14, for e*, dtr, dtr-eq and lru, as
a multiple of N (2 without recomputation). A curve ends where it passes ``MOST`` times N.

Written under the results folder: ``online_theorem.json``, ``.md``, ``.svg`` and ``.png``. Exit code 1 where one other than
lru runs more than ``BOUND`` times N operators anywhere.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowtide.extras import require
from lowtide.trace import Created, Event, OperatorCall, Release, ReplayStatus, Trace, simulate

RESULTS = Path(__file__).parent / "results"
LAYERS = tuple(2**exponent for exponent in range(6, 15))
ROOTS = 2  # the budget in roots of N
BOUND = 4.5
MOST = 64.0
CURVES = (("e-star", "banish"), ("dtr", "banish"), ("dtr-eq", "banish"), ("dtr-eq", "eager"), ("lru", "eager"))
BOUNDED = ("e-star", "dtr", "dtr-eq")


@dataclass(frozen=True, slots=True)
class Point:
    """``operators``: how many ran, ``None`` where it would have been more than ``MOST`` times the layers."""

    heuristic: str
    policy: str
    layers: int
    budget: int
    operators: int | None

    @property
    def per_layer(self) -> float | None:
        return None if self.operators is None else self.operators / self.layers


def linear_network(layers: int) -> Trace:
    """One forward and backward pass; every tensor one byte, every operator one nanosecond.

    Layer i computes activation i from the one before. Its gradient is computed from the activation before and the gradient
    after it; the activation is released before that, the gradient after the next one.
    """
    events: list[Event] = []
    for layer in range(layers):
        events.append(OperatorCall("forward", 1, (layer - 1,) if layer else (), (Created(layer, 1),)))
    for step in range(layers):
        layer, gradient = layers - 1 - step, layers + step
        events.append(Release(layer))
        reads = ((layer - 1,) if layer and step else ()) + ((gradient - 1,) if step else ())
        events.append(OperatorCall("backward", 1, reads, (Created(gradient, 1),)))
        if step:
            events.append(Release(gradient - 1))
    return Trace(tuple(events), f"linear network of {layers} layers", forward_calls=layers)


def budget_for(layers: int) -> int:
    return ROOTS * (math.isqrt(layers - 1) + 1)


def measure(heuristic: str, policy: str, layers: int) -> Point:
    """Replay the network of so many layers."""
    limit = MOST / 2  # of twice the layers
    budget = budget_for(layers)
    result = simulate(linear_network(layers), budget, heuristic, policy=policy, most_slowdown=limit)
    return Point(heuristic, policy, layers, budget, result.time_ns if result.status is ReplayStatus.OK else None)


def curve(heuristic: str, policy: str, layers: Sequence[int]) -> list[Point]:
    """Up to the first network that takes too many."""
    points: list[Point] = []
    for count in layers:
        points.append(measure(heuristic, policy, count))
        if points[-1].operators is None:
            break
    return points


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder to write to")
    options = parser.parse_args(arguments)
    points: list[Point] = []
    for heuristic, policy in CURVES:
        began = time.process_time()
        points += curve(heuristic, policy, LAYERS)
        print(f"{heuristic}, {policy}: {time.process_time() - began:.1f} s of CPU time")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / "online_theorem.json"
    path.write_text(json.dumps([asdict(point) for point in points], indent=1) + "\n")
    path.with_suffix(".md").write_text(document(points))
    figure(points).savefig(path.with_suffix(".png"), dpi=110)
    figure(points).savefig(path.with_suffix(".svg"), metadata={"Date": None})
    broken = exceeding(points)
    print("\n".join(broken) or f"at most {most_per_layer(points):.2f} operators per layer with {', '.join(BOUNDED)}")
    return int(bool(broken))


def most_per_layer(points: Sequence[Point]) -> float:
    """Of the heuristics that are to be bounded."""
    return max(point.per_layer or math.inf for point in points if point.heuristic in BOUNDED)


def exceeding(points: Sequence[Point]) -> list[str]:
    return [
        f"{point.heuristic}, {point.policy}: more than {BOUND:g} operators per layer at {point.layers} layers"
        for point in points
        if point.heuristic in BOUNDED and (point.per_layer is None or point.per_layer > BOUND)
    ]


def document(points: Sequence[Point]) -> str:
    """Operators per layer as a Markdown table."""
    by_place = {(point.heuristic, point.policy, point.layers): point for point in points}
    lines = [
        "# Linear networks online",
        "",
        "`python -m benchmarks.online_theorem`: operators run per layer, forward and backward of a feed-forward network of N",
        f"equal layers, in a budget of {ROOTS} x the root of N activations; 2 is a pass without recomputation. Counted on the",
        f"trace simulator; a dash: over {MOST:g}.",
        "",
        f"| N | budget | {' | '.join(f'{heuristic}, {policy}' for heuristic, policy in CURVES)} |",
        "|---:|---:|" + "---:|" * len(CURVES),
    ]
    for layers in LAYERS:
        cells = [_cell(by_place.get((heuristic, policy, layers))) for heuristic, policy in CURVES]
        lines.append(f"| {layers} | {budget_for(layers)} | {' | '.join(cells)} |")
    lines += [
        "",
        f"The constant: at most {most_per_layer(points):.2f} operators per layer with {', '.join(BOUNDED)}. `lru` has",
        "none: from N = 128 on, twice as many layers take 1.5 to 1.9 times as many operators per layer.",
        "",
        "![operators per layer](online_theorem.svg)",
    ]
    return "\n".join(lines) + "\n"


def _cell(point: Point | None) -> str:
    return "-" if point is None or point.per_layer is None else f"{point.per_layer:.2f}"


def figure(points: Sequence[Point]) -> Any:
    """A ``matplotlib.figure.Figure``: operators per layer against layers, both logarithmic."""
    drawn = require("matplotlib.figure").Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.add_subplot()
    for (heuristic, policy), marker in zip(CURVES, "osDv^", strict=True):
        own = [point for point in points if (point.heuristic, point.policy) == (heuristic, policy)]
        own = [point for point in own if point.operators is not None]
        label = f"{heuristic}, {policy}"
        axes.plot([p.layers for p in own], [p.per_layer for p in own], marker=marker, alpha=0.8, label=label)
    axes.axhline(2, color="black", linestyle="--", linewidth=1, label="without recomputation")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(require("matplotlib.ticker").FormatStrFormatter("%g"))
    axes.set(title=f"Linear networks in a budget of {ROOTS} sqrt(N) activations", xlabel="layers N")
    axes.set(ylabel="operators / N")
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return drawn


if __name__ == "__main__":
    sys.exit(main())
