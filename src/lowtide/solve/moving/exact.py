"""``checkmate`` with a second memory: solves the program on the clock of transfers, and translates its solution to a
schedule.

HiGHS solves it twice, with and without presolve; the lower of the two bounds counts.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from lowtide.ir import Schedule, schedule_from_sequence, shared_storages
from lowtide.solve.milp.linear import Floats, Outcome, SolverOptions, solve_program
from lowtide.solve.milp.search import NEVER
from lowtide.solve.model.compact import compact
from lowtide.solve.model.reach import recompute_columns
from lowtide.solve.model.split import all_movable, movable_storages, split
from lowtide.solve.moving.program import MovingModel
from lowtide.solve.moving.steps import place_transfers
from lowtide.solve.problem import Problem

MOVING_UP_TO = 8_000  # variables R[t, i] of the split graph, in which fetches are nodes too


@dataclass(frozen=True, slots=True)
class Proof:
    """No schedule with transfers within the budget takes less than ``bound_ns`` (``NEVER``: there is none).
    ``schedule``: the solution that was found, whatever its peak."""

    bound_ns: int
    schedule: Schedule | None = None


def solve_with_transfers(problem: Problem, options: SolverOptions, known_ns: int | None) -> Proof:
    """The program's answer; empty if the graph is too large, or its model covers only part of it. ``known_ns``: the
    time of a schedule within the budget, if there is one."""
    formulation = formulate(problem, known_ns)
    if formulation is None:
        return Proof(0)
    formulation.build()
    options = dataclasses.replace(options, absolute_gap=formulation.absolute_gap)
    options = dataclasses.replace(options, time_limit=options.time_limit / 2)
    results = [
        solve_program(formulation.program, dataclasses.replace(options, presolve=each)) for each in (True, False)
    ]
    if all(result.outcome is Outcome.INFEASIBLE for result in results):
        return Proof(NEVER if known_ns is None else known_ns)
    bound = formulation.lower_bound(min(result.bound for result in results))
    solved = min(results, key=lambda result: result.objective)
    return Proof(bound, translated(problem, formulation, solved.values) if len(solved.values) else None)


def formulate(problem: Problem, known_ns: int | None = None) -> MovingModel | None:
    """The program, not yet built; ``None`` if there is none."""
    graph, costs, memory = problem.graph, problem.costs, problem.costs.second_memory
    if memory is None or shared_storages(graph):
        return None
    room = memory.capacity_bytes
    moving = [one for one in all_movable(graph, costs) if room is None or costs.storage_bytes[one] <= room]
    parts = split(graph, costs, dict.fromkeys(moving, 0), floor=True, apart=True)
    model = compact(parts.graph, parts.costs, floor=True)
    if not model.bounding or recompute_columns(model, reduced=False) > MOVING_UP_TO:
        return None
    return MovingModel(model, problem.budget_bytes, ordered=False, parts=parts, memory=memory, known_ns=known_ns)


def translated(problem: Problem, formulation: MovingModel, values: Floats) -> Schedule:
    """The schedule of a solution, with its transfers placed. A storage that is fetched anywhere, and that planners may
    move, is fetched wherever it is made again."""
    graph, costs, parts = problem.graph, problem.costs, formulation.parts
    op_of = [int(op) for op in formulation.model.op_of_node]
    fetched = {op_of[node] for table in formulation.fetched for node, column in table.items() if values[column] > 0.5}
    moved = {parts.fetched[op] for op in fetched}.intersection(movable_storages(graph, costs))
    simple = split(graph, costs, dict.fromkeys(moved, 1))
    computes, fetches = simple.computes, simple.fetches
    sequence: list[int] = []
    met: set[int] = set()
    for op in (op_of[node] for node in formulation.sequence(values)):
        computed = parts.computed[op]
        if computed is None:
            sequence += [fetches[storage] for storage in (parts.fetched[op],) if storage in fetches]
        elif computes[computed] not in met or not simple.graph.ops[computes[computed]].once:
            sequence.append(computes[computed])
            met.add(computes[computed])
    schedule = simple.schedule(schedule_from_sequence(simple.graph, sequence, released=True))
    return place_transfers(graph, costs, schedule, problem.budget_bytes)
