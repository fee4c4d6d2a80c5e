"""The plan: a graph, its costs, and the schedule that fits a budget. No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lowtide.budget import parse_budget
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.ir import Costs, Graph, Schedule, check, keep_all_schedule, simulate
from lowtide.ir.schedule import Compute
from lowtide.ir.serial import graph_from_json, graph_to_json, read_json, schedule_from_json, schedule_to_json
from lowtide.report.curve import CURVE_PLANNER, CURVE_POINTS, Curve, CurvePoint, make_curve
from lowtide.store import write_atomically
from lowtide.report.measured import Measured
from lowtide.report.text import render_plan
from lowtide.report.units import format_bytes
from lowtide.solve import Problem, Solution, format_spec, get_planner, minimum_peak, solve

PLAN_FORMAT = "lowtide-plan/1"
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A schedule of a training program within a memory budget.

    Bytes are what a forward and backward pass allocates above what was allocated when it began. ``time_ns`` is the
    predicted time of the pass, ``lower_bound_ns`` a proven bound on it for any schedule within the budget, if there is
    one. ``solve_seconds`` is what the planner took when the plan was made, ``cached`` whether that was in an earlier
    process (``plan_cache``). ``str(plan)`` is a readable report. ``known_curve`` is what ``with_curve`` found; it is saved
    along.
    """

    graph: Graph
    costs: Costs
    schedule: Schedule
    planner: str
    budget_bytes: int
    peak_bytes: int
    unconstrained_peak_bytes: int
    time_ns: int
    lower_bound_ns: int | None = None
    seed: int = 0
    solve_seconds: float = 0.0
    cached: bool = False
    known_curve: Curve | None = None

    @property
    def overhead(self) -> float:
        """Extra time over the same program without recomputation, as a fraction."""
        total = self.costs.total_time_ns
        return self.time_ns / total - 1 if total else 0.0

    def curve(
        self, *, points: int = CURVE_POINTS, planner: str = CURVE_PLANNER, on_progress: Progress | None = None
    ) -> Curve:
        """Overhead against budget, from the unconstrained peak to the least budget that ``planner`` meets.

        There are ``points`` budgets and this plan's. The default planner takes seconds per point.
        """
        known = CurvePoint(self.budget_bytes, self.peak_bytes, self.time_ns, self.lower_bound_ns)
        return make_curve(
            self.graph,
            self.costs,
            points=points,
            planner=planner,
            seed=self.seed,
            known=[known],
            on_progress=on_progress,
        )

    def with_curve(
        self, *, points: int = CURVE_POINTS, planner: str = CURVE_PLANNER, on_progress: Progress | None = None
    ) -> Plan:
        """This plan with its ``curve`` for reports, so that it is not searched for again."""
        return dataclasses.replace(
            self, known_curve=self.curve(points=points, planner=planner, on_progress=on_progress)
        )

    def report(self, path: str | Path, measurement: Measured | None = None) -> None:
        """Write a report of this plan; the extension of ``path`` says which: see ``lowtide report``.

        ``measurement``: of a step that ran under the plan, from ``lowtide.measure``. The curve is that of ``with_curve``.
        """
        from lowtide.report.report import report_of_plan
        from lowtide.report.writers import check_extension, write_report

        check_extension(path)
        write_report(report_of_plan(self, self.known_curve, measurement), path)

    def save(self, path: str | Path) -> None:
        """Write the plan as ``lowtide-plan/1`` JSON, atomically."""
        data = {
            "format": PLAN_FORMAT,
            "planner": self.planner,
            "seed": self.seed,
            "budget_bytes": self.budget_bytes,
            "peak_bytes": self.peak_bytes,
            "unconstrained_peak_bytes": self.unconstrained_peak_bytes,
            "time_ns": self.time_ns,
            "lower_bound_ns": self.lower_bound_ns,
            "solve_seconds": self.solve_seconds,
            "curve": None if self.known_curve is None else self.known_curve.to_json(),
            "graph": graph_to_json(self.graph, self.costs),
            "schedule": schedule_to_json(self.schedule),
        }
        write_atomically(Path(path), json.dumps(data))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a saved plan; checks and simulates its schedule again.

        Raises ``PlanError`` for a file that is not a plan and ``ScheduleError`` for a schedule that is not valid.
        """
        data = read_json(path)
        if data.get("format") != PLAN_FORMAT:
            raise PlanError(
                f"{path} is not a saved plan: expected format {PLAN_FORMAT!r}, found {data.get('format')!r}."
            )
        try:
            graph, costs = graph_from_json(data["graph"])
            schedule = schedule_from_json(data["schedule"])
            check(graph, schedule)
            result = simulate(graph, costs, schedule)
            bound, curve = data["lower_bound_ns"], data.get("curve")
            return cls(
                graph,
                costs,
                schedule,
                str(data["planner"]),
                int(data["budget_bytes"]),
                result.peak_bytes,
                simulate(graph, costs, keep_all_schedule(graph)).peak_bytes,
                result.time_ns,
                None if bound is None else int(bound),
                int(data["seed"]),
                float(data["solve_seconds"]),
                known_curve=None if curve is None else Curve.from_json(curve),
            )
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise PlanError(f"{path} is not a complete plan: {type(error).__name__} {error}.") from error

    def __str__(self) -> str:
        return render_plan(self)


def make_plan(
    graph: Graph,
    costs: Costs,
    *,
    budget: int | str,
    planner: str = "auto",
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan ``graph`` within ``budget``. Raises ``InfeasibleBudgetError`` where the planner finds no schedule."""
    unconstrained = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    budget_bytes = parse_budget(budget, unconstrained)
    problem = Problem(graph, costs, budget_bytes, seed, on_progress)
    solution = solve(problem, planner)
    if solution.schedule is None:
        raise infeasible(problem, solution, unconstrained, planner)
    return Plan(
        graph,
        costs,
        solution.schedule,
        format_spec(get_planner(planner)),
        budget_bytes,
        solution.peak_bytes,
        unconstrained,
        solution.time_ns,
        solution.lower_bound_ns,
        seed,
        solution.solve_seconds,
    )


def infeasible(problem: Problem, solution: Solution, unconstrained: int, planner: str) -> InfeasibleBudgetError:
    """The error for a budget that was not met: what is known to be reachable, and where the bottleneck is."""
    lowest, minimum = solution.lowest_schedule, solution.minimum_bytes
    if lowest is None:
        reached, lowest = minimum_peak(problem.graph, problem.costs, problem.seed)
        minimum = reached if minimum is None else minimum
    step = lowest.steps[simulate(problem.graph, problem.costs, lowest).peak_step]
    op = problem.graph.ops[step.op] if isinstance(step, Compute) else problem.graph.ops[0]
    place = (f" of {op.module}" if op.module else "") + (f" ({op.source})" if op.source else "")
    hint = "" if planner.startswith("auto") else " Planner auto may reach less."
    percent = 100 * (minimum or 0) / max(unconstrained, 1)
    return InfeasibleBudgetError(
        f"planner {planner} found no schedule within {problem.budget_bytes} bytes ({format_bytes(problem.budget_bytes)}); the "
        f"smallest budget it can meet is {minimum} bytes ({format_bytes(minimum or 0)}, {percent:.1f}% of the "
        f"{format_bytes(unconstrained)} without rematerialization). The bottleneck is {op.name}{place}.{hint} Raise the "
        "budget, or make the batch or the sequence smaller.",
        minimum_bytes=minimum or 0,
        operator=op.name,
        source=op.source,
        budget_bytes=problem.budget_bytes,
    )
