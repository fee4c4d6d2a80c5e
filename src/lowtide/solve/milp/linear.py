"""Linear and mixed-integer programs as arrays, solved by HiGHS.

A program minimises ``cost @ x`` with ``lower <= x <= upper``, ``row_lower <= A x <= row_upper`` and some columns
integer. ``ProgramBuilder`` collects it piece by piece, ``solve_program`` hands it over. HiGHS (Huangfu and Hall 2018; MIT)
comes with the extra ``ilp`` and is imported only when a program is solved.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
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
class LinearProgram:
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
class SolverOptions:
    """``method``: choose, simplex, ipm or pdlp (for linear programs). ``gap`` is relative, ``absolute_gap`` in units
    of the objective. ``presolve``: once at all; again after the root, HiGHS 1.15 called solutions optimal that were not."""

    time_limit: float = 60.0
    gap: float = 0.0
    absolute_gap: float = 1e-6
    threads: int = 1
    seed: int = 0
    method: str = "choose"
    presolve: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class SolverResult:
    """``values`` is empty without a solution. ``bound`` is a lower bound on the objective (-inf where none is known)."""

    outcome: Outcome
    values: Floats
    objective: float
    bound: float


class ProgramBuilder:
    """A program under construction. Columns and rows are numbered in the order in which they are added."""

    def __init__(self) -> None:
        self._columns: list[tuple[float, float, float, bool]] = []  # cost, lower, upper, integer
        self._counts: list[int] = []  # entries of each row
        self._index: list[int] = []
        self._value: list[float] = []
        self._bounds: list[tuple[float, float]] = []  # of each row

    def add_column(self, cost: float = 0.0, lower: float = 0.0, upper: float = INFINITY, integer: bool = False) -> int:
        """The number of the new column."""
        self._columns.append((cost, lower, upper, integer))
        return len(self._columns) - 1

    def add_row(
        self, index: Sequence[int], value: Sequence[float], lower: float = -INFINITY, upper: float = INFINITY
    ) -> None:
        self._counts.append(len(index))
        self._index.extend(index)
        self._value.extend(value)
        self._bounds.append((lower, upper))

    def build(self) -> LinearProgram:
        cost, lower, upper, integer = np.array(self._columns, np.float64).reshape(-1, 4).T.copy()
        row_lower, row_upper = np.array(self._bounds, np.float64).reshape(-1, 2).T.copy()
        start = np.cumsum([0, *self._counts], dtype=np.int32)
        index, value = np.array(self._index, np.int32), np.array(self._value, np.float64)
        return LinearProgram(cost, lower, upper, integer.astype(np.bool_), start, index, value, row_lower, row_upper)


def solve_program(program: LinearProgram, options: SolverOptions) -> SolverResult:
    """Solve it. Raises ``MissingExtraError``."""
    highspy = require("highspy")
    if not len(program.cost):  # HiGHS does not look at the rows then
        possible = bool(np.all(program.row_lower <= 0) and np.all(program.row_upper >= 0))
        return SolverResult(Outcome.OPTIMAL if possible else Outcome.INFEASIBLE, np.zeros(0), 0.0, 0.0)
    highs = highspy.Highs()
    for name, setting in _settings(options).items():
        highs.setOptionValue(name, setting)
    by_row, minimise, entries = int(highspy.MatrixFormat.kRowwise), int(highspy.ObjSense.kMinimize), len(program.index)
    shape = (len(program.cost), len(program.row_lower), entries, by_row, minimise, 0.0)
    columns = (program.cost, program.lower, program.upper, program.row_lower, program.row_upper)
    matrix = (program.start[:-1], program.index, program.value)
    highs.passModel(*shape, *columns, *matrix, program.integer.astype(np.int32))
    highs.run()
    return _result(highspy, highs, mixed=bool(program.integer.any()))


def _settings(options: SolverOptions) -> dict[str, Any]:
    return {
        "output_flag": False,
        "time_limit": max(options.time_limit, 0.01),
        "threads": options.threads,
        "parallel": "off" if options.threads == 1 else "on",
        "random_seed": options.seed,
        "solver": options.method,
        "run_crossover": "off",
        "presolve": "choose" if options.presolve else "off",
        "mip_allow_restart": False,
        "mip_rel_gap": options.gap,
        "mip_abs_gap": options.absolute_gap,
        "mip_feasibility_tolerance": 1e-6,
    }


def _result(highspy: Any, highs: Any, mixed: bool) -> SolverResult:
    status, info = highs.getModelStatus(), highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return SolverResult(Outcome.INFEASIBLE, np.zeros(0), INFINITY, INFINITY)
    optimal, feasible = status == kinds.kOptimal, info.primal_solution_status == 2
    values = np.array(highs.getSolution().col_value) if feasible else np.zeros(0)
    objective = float(info.objective_function_value) if feasible else INFINITY
    bound = float(info.mip_dual_bound) if mixed else (objective if optimal else -INFINITY)
    found = Outcome.OPTIMAL if optimal and feasible else Outcome.FEASIBLE if feasible else Outcome.UNKNOWN
    return SolverResult(found, values, objective, bound)
