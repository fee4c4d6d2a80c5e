"""Linear and mixed-integer programs as arrays, solved by HiGHS.

A program minimises ``cost @ x`` with ``lower <= x <= upper``, ``row_lower <= A x <= row_upper`` and some columns
integer. ``Rows`` collects it piece by piece, ``solve_program`` hands it over. HiGHS (Huangfu and Hall 2018; MIT licence)
comes with the extra ``milp`` and is imported only when a program is solved.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide.extras import require

Floats = npt.NDArray[np.float64]
Columns = npt.NDArray[np.int32]

INFINITY = float("inf")


class Outcome(enum.Enum):
    """What a solver run established."""

    OPTIMAL = "optimal"  # within the gap asked for
    FEASIBLE = "feasible"  # a solution, not proven best
    INFEASIBLE = "infeasible"  # proven, within the solver's tolerances
    UNKNOWN = "unknown"  # stopped by a limit without a solution


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Rows are in compressed form: those of row r are ``index[start[r]:start[r + 1]]`` and the same of ``value``."""

    cost: Floats
    lower: Floats
    upper: Floats
    integer: npt.NDArray[np.bool_]
    start: Columns
    index: Columns
    value: Floats
    row_lower: Floats
    row_upper: Floats


@dataclass(frozen=True, slots=True)
class Settings:
    """``method``: choose, simplex, ipm or pdlp (for linear programs). ``gap`` is relative, ``absolute_gap`` in units
    of the objective."""

    time_limit: float = 60.0
    gap: float = 0.0
    absolute_gap: float = 1e-6
    threads: int = 1
    seed: int = 0
    method: str = "choose"
    crossover: bool = False
    log: bool = False
    feasibility: float = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """``values`` is empty without a solution. ``bound`` is a lower bound on the objective (-inf where none is known).

    ``row_duals`` and ``reduced_costs`` are of the linear program, empty for a mixed-integer one.
    """

    outcome: Outcome
    values: Floats
    objective: float
    bound: float
    row_duals: Floats = field(default_factory=lambda: np.zeros(0))
    reduced_costs: Floats = field(default_factory=lambda: np.zeros(0))
    seconds: float = 0.0


class Rows:
    """A program under construction. Columns and rows are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.columns = 0
        self.rows = 0
        self._column_parts: list[tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]] = []
        self._row_parts: list[tuple[Columns, Columns, Floats, Floats, Floats]] = []  # counts, index, value, bounds
        self._counts: list[int] = []
        self._index: list[int] = []
        self._value: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def add_columns(
        self,
        count: int,
        cost: npt.ArrayLike = 0.0,
        lower: npt.ArrayLike = 0.0,
        upper: npt.ArrayLike = INFINITY,
        integer: npt.ArrayLike = False,
    ) -> Columns:
        """The numbers of ``count`` new columns; each argument is one number or one per column."""
        parts = [np.broadcast_to(np.asarray(part, np.float64), count) for part in (cost, lower, upper)]
        self._column_parts.append((*parts, np.broadcast_to(np.asarray(integer, np.bool_), count)))  # type: ignore[arg-type]
        self.columns += count
        return np.arange(self.columns - count, self.columns, dtype=np.int32)

    def add_column(self, cost: float = 0.0, lower: float = 0.0, upper: float = INFINITY, integer: bool = False) -> int:
        return int(self.add_columns(1, cost, lower, upper, integer)[0])

    def add_rows(
        self,
        start: npt.ArrayLike,
        index: npt.ArrayLike,
        value: npt.ArrayLike,
        lower: npt.ArrayLike = -INFINITY,
        upper: npt.ArrayLike = INFINITY,
    ) -> None:
        """Rows in compressed form; ``value``, ``lower`` and ``upper`` may be one number for all."""
        self._flush()
        counts = np.diff(np.asarray(start)).astype(np.int32)
        columns = np.asarray(index, np.int32)
        values = np.broadcast_to(np.asarray(value, np.float64), len(columns))
        bounds = [np.broadcast_to(np.asarray(bound, np.float64), len(counts)) for bound in (lower, upper)]
        self._row_parts.append((counts, columns, values, *bounds))  # type: ignore[arg-type]
        self.rows += len(counts)

    def add_row(
        self, index: Sequence[int], value: Sequence[float], lower: float = -INFINITY, upper: float = INFINITY
    ) -> int:
        """One row; its number."""
        self._counts.append(len(index))
        self._index.extend(index)
        self._value.extend(value)
        self._lower.append(lower)
        self._upper.append(upper)
        self.rows += 1
        return self.rows - 1

    def build(self) -> Program:
        self._flush()
        empty = np.zeros(0)
        columns = [np.concatenate(parts) for parts in zip(*self._column_parts, strict=True)] or [empty] * 4
        rows = [np.concatenate(parts) for parts in zip(*self._row_parts, strict=True)] or [empty] * 5
        start = np.zeros(len(rows[0]) + 1, np.int32)
        np.cumsum(rows[0], out=start[1:])
        return Program(
            cost=columns[0],
            lower=columns[1],
            upper=columns[2],
            integer=columns[3].astype(np.bool_),
            start=start,
            index=rows[1].astype(np.int32),
            value=rows[2],
            row_lower=rows[3],
            row_upper=rows[4],
        )

    def _flush(self) -> None:
        """Move the rows added one by one to the arrays."""
        if self._counts:
            part = (np.array(self._counts, np.int32), np.array(self._index, np.int32), np.array(self._value))
            self._row_parts.append((*part, np.array(self._lower), np.array(self._upper)))
            self._counts, self._index, self._value, self._lower, self._upper = [], [], [], [], []


def solve_program(program: Program, settings: Settings, start: Floats | None = None) -> Result:
    """Solve it. ``start`` is a solution to begin with (mixed-integer programs); columns that are NaN are left to HiGHS.
    Raises ``MissingExtraError``."""
    highspy = require("highspy")
    if not len(program.cost):  # HiGHS does not look at the rows then
        possible = bool(np.all(program.row_lower <= 0) and np.all(program.row_upper >= 0))
        return Result(Outcome.OPTIMAL if possible else Outcome.INFEASIBLE, np.zeros(0), 0.0, 0.0)
    highs = highspy.Highs()
    _configure(highs, settings)
    mixed = bool(program.integer.any())
    _pass(highspy, highs, program)
    if start is not None and mixed:
        known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
        highs.setSolution(len(known), known, start[known])
    highs.run()
    return _result(highspy, highs, mixed)


def _configure(highs: Any, settings: Settings) -> None:
    options = {
        "output_flag": settings.log,
        "time_limit": max(settings.time_limit, 0.01),
        "threads": settings.threads,
        "parallel": "off" if settings.threads == 1 else "on",
        "random_seed": settings.seed,
        "solver": settings.method,
        "run_crossover": "on" if settings.crossover else "off",
        "mip_rel_gap": settings.gap,
        "mip_abs_gap": settings.absolute_gap,
        "mip_feasibility_tolerance": settings.feasibility,
    }
    for name, value in options.items():
        highs.setOptionValue(name, value)


def _pass(highspy: Any, highs: Any, program: Program) -> None:
    by_row, minimise, entries = int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), len(program.index)
    shape = (len(program.cost), len(program.row_lower), entries, by_row, minimise, 0.0)
    columns = (program.cost, program.lower, program.upper, program.row_lower, program.row_upper)
    matrix = (program.start[:-1], program.index, program.value)
    highs.passModel(*shape, *columns, *matrix, program.integer.astype(np.int32))


def _result(highspy: Any, highs: Any, mixed: bool) -> Result:
    status, info = highs.getModelStatus(), highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Result(Outcome.INFEASIBLE, np.zeros(0), INFINITY, INFINITY, seconds=highs.getRunTime())
    optimal = status == kinds.kOptimal
    feasible = info.primal_solution_status == 2
    solution = highs.getSolution()
    values = np.array(solution.col_value) if feasible else np.zeros(0)
    objective = float(info.objective_function_value) if feasible else INFINITY
    bound = float(info.mip_dual_bound) if mixed else (objective if optimal else -INFINITY)
    found = Outcome.OPTIMAL if optimal and feasible else Outcome.FEASIBLE if feasible else Outcome.UNKNOWN
    if mixed:
        return Result(found, values, objective, bound, seconds=highs.getRunTime())
    duals, reduced = np.array(solution.row_dual), np.array(solution.col_dual)
    return Result(found, values, objective, bound, duals, reduced, highs.getRunTime())
