"""Compare planners: one cell per instance, budget and planner, as a text table, as JSON and as a matplotlib figure."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError
from lowtide.extras import require
from lowtide.ir import Costs, Graph, SecondMemory, keep_all_schedule, load_instance, plain_time_ns, simulate
from lowtide.report.tables import table_lines
from lowtide.solve import Problem, solve
from lowtide.units import format_bytes, overhead_percent

_LOG = logging.getLogger(__name__)
COMPARISON_FORMAT = "lowtide-comparison/1"
FAILED, OVER_TIME = "failed", "over time"
_START_SECONDS = 60.0  # to import, load and connect; the planner's time begins after that
_GRACE_SECONDS = 0.5
LEGEND = "overhead in % (proven lower bound), seconds of planning; * marks a proven optimum"
_MARKERS = "osD^v<>pPX*hd8H1234x+"
_COLOURS = 10  # in matplotlib's default cycle; markers repeat later, so each pair is used once


@dataclass(frozen=True, slots=True)
class Instance:
    """A graph to plan. ``name`` is unique in a comparison; ``peak_bytes`` is its peak without recomputation."""

    name: str
    ops: int
    peak_bytes: int
    time_ns: int

    @classmethod
    def of(cls, name: str, graph: Graph, costs: Costs) -> Instance:
        plain = simulate(graph, costs, keep_all_schedule(graph))
        return cls(name, len(graph.ops), plain.peak_bytes, plain.time_ns)


@dataclass(frozen=True, slots=True)
class Cell:
    """One planner's answer.

    ``status``: the planner's status, ``failed`` (``message`` says why) or ``over time``. Figures that come from a
    schedule are ``None`` without one. ``seconds`` is the planner's time; ``cpu_seconds`` that of all its threads and
    processes, if measured.
    """

    instance: str
    planner: str
    budget: str
    budget_bytes: int
    status: str
    peak_bytes: int | None = None
    time_ns: int | None = None
    overhead_percent: float | None = None
    lower_bound_percent: float | None = None
    minimum_bytes: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """What a planner is asked, without the graph. The answer is a ``Cell``."""

    instance: str
    planner: str
    budget: str
    budget_bytes: int
    seed: int = 0
    second_memory: SecondMemory | None = None  # replaces that of the graph

    def cell(self, status: str, **figures: Any) -> Cell:
        """The answer; ``figures`` are fields of ``Cell``."""
        return Cell(self.instance, self.planner, self.budget, self.budget_bytes, status, **figures)


def run_cell(graph: Graph, costs: Costs, task: Task) -> Cell:
    """Ask a planner, check its schedule and simulate it. Any exception of the planner gives a ``failed`` cell."""
    began = time.perf_counter()
    try:
        solution = solve(Problem(graph, costs, task.budget_bytes, task.seed), task.planner)
    except Exception as error:  # noqa: BLE001  a defect of one planner must not cost the others their row
        message = str(error)
        if not isinstance(error, LowtideError):
            _LOG.warning("%s failed", task, exc_info=True)
            message = f"{type(error).__name__}: {error}"
        return task.cell(FAILED, message=message, seconds=time.perf_counter() - began)
    found, bound, least = solution.schedule is not None, solution.lower_bound_ns, plain_time_ns(graph, costs)
    return task.cell(
        solution.status.value,
        peak_bytes=solution.peak_bytes if found else None,
        time_ns=solution.time_ns if found else None,
        overhead_percent=overhead_percent(solution.time_ns, least) if found else None,
        lower_bound_percent=None if bound is None else overhead_percent(bound, least),
        minimum_bytes=solution.minimum_bytes,
        seconds=round(time.perf_counter() - began, 3),
    )


def run_limited(path: str | Path, task: Task, limit_seconds: float) -> Cell:
    """Answer ``task`` for the instance in ``path`` in a new process; ``over time`` if it takes longer than the limit.

    The limit covers the planner and the check of its schedule, but not the start of the process. ``cpu_seconds`` is
    set.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(str(path), task, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_START_SECONDS):
            return task.cell(FAILED, message="its process did not start")
        receiver.recv()  # it has begun
        if not receiver.poll(limit_seconds + _GRACE_SECONDS):
            return task.cell(OVER_TIME, seconds=limit_seconds)
        cell: Cell = receiver.recv()
        return cell
    except EOFError:
        return task.cell(FAILED, message="its process ended without an answer")
    finally:
        receiver.close()
        process.kill()
        process.join()


def _answer(path: str, task: Task, sender: multiprocessing.connection.Connection) -> None:
    graph, costs = load_instance(path)
    if task.second_memory is not None:
        costs = dataclasses.replace(costs, second_memory=task.second_memory)
    sender.send("begun")
    # CPU time is that of this process and of its children that have ended.
    began, cpu_began = time.perf_counter(), sum(os.times()[:4])
    cell = run_cell(graph, costs, task)
    seconds, cpu = time.perf_counter() - began, sum(os.times()[:4]) - cpu_began
    sender.send(dataclasses.replace(cell, seconds=round(seconds, 3), cpu_seconds=round(cpu, 3)))


def comparison_to_json(instances: Iterable[Instance], cells: Iterable[Cell]) -> dict[str, Any]:
    """A ``lowtide-comparison/1`` object."""
    return {
        "format": COMPARISON_FORMAT,
        "instances": [dataclasses.asdict(instance) for instance in instances],
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }


def render_comparison(instance: Instance, cells: Sequence[Cell]) -> str:
    """A table with a row per planner and a column per budget, and a line per failure."""
    own = [cell for cell in cells if cell.instance == instance.name]
    budgets = list(dict.fromkeys(cell.budget for cell in own))
    texts = {(cell.planner, cell.budget): cell_text(cell) for cell in own}
    planners = dict.fromkeys(cell.planner for cell in own)
    rows = [[planner, *(texts.get((planner, budget), "") for budget in budgets)] for planner in planners]
    title = f"{instance.name}: {instance.ops} ops, peak without recomputation {format_bytes(instance.peak_bytes)}"
    lines = [title, *table_lines([["planner", *budgets], *rows])]
    lines += [f"  {cell.planner} at {cell.budget}: {cell.message}" for cell in own if cell.message]
    return "\n".join(lines)


def cell_text(cell: Cell) -> str:
    """``12.345 (10.000) 3.2 s``, or the status if there is no schedule."""
    seconds = "" if cell.seconds is None else f" {cell.seconds:.1f} s"
    if cell.overhead_percent is None:
        return cell.status + seconds
    bound = "" if cell.lower_bound_percent is None else f" ({cell.lower_bound_percent:.3f})"
    return f"{cell.overhead_percent:.3f}{'*' if cell.status == 'optimal' else ''}{bound}{seconds}"


def comparison_figure(instance: Instance, cells: Sequence[Cell]) -> Any:
    """A ``matplotlib.figure.Figure``: overhead in percent (logarithmic above 1) against budget in percent of the peak.

    Budgets that a planner does not meet are left out. The dashed line is the best proven lower bound of all planners.
    """
    own = [cell for cell in cells if cell.instance == instance.name]
    figure = require("matplotlib.figure").Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for index, planner in enumerate(dict.fromkeys(cell.planner for cell in own)):
        points = _points(instance, [c for c in own if c.planner == planner], "overhead_percent")
        auto = planner.startswith("auto")
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            color=f"C{index % _COLOURS}",
            marker=_MARKERS[index % len(_MARKERS)],
            linewidth=2 if auto else 1,
            markersize=7 if auto else 5,
            alpha=1.0 if auto else 0.8,
            zorder=3 if auto else 2,
            label=planner if points else f"{planner} (none met)",
        )
    bounds = dict(_points(instance, own, "lower_bound_percent"))  # the last of each budget is the largest
    if bounds:
        axes.plot([*bounds], [*bounds.values()], color="black", linestyle="--", linewidth=1, label="lower bound")
    axes.set_yscale("symlog", linthresh=1)
    percent = require("matplotlib.ticker").FormatStrFormatter("%g")
    axes.yaxis.set_major_formatter(percent)
    axes.set(title=f"{instance.name} ({instance.ops} ops)", ylim=(0, None))
    axes.set(xlabel="budget (% of the peak without recomputation)", ylabel="overhead (%)")
    axes.set_xticks(sorted({round(_share(instance, cell), 1) for cell in own}))
    axes.xaxis.set_major_formatter(percent)
    axes.invert_xaxis()
    axes.grid(visible=True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


def _points(instance: Instance, cells: Sequence[Cell], figure: str) -> list[tuple[float, float]]:
    """(budget in percent of the peak, percent) of the cells that have the figure, by budget."""
    pairs = [(_share(instance, cell), getattr(cell, figure)) for cell in cells]
    return sorted((share, percent) for share, percent in pairs if percent is not None)


def _share(instance: Instance, cell: Cell) -> float:
    return 100 * cell.budget_bytes / max(instance.peak_bytes, 1)
