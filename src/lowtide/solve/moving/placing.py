"""When transfers run, and collectives beside computing: a schedule that frees what they need as soon as it can, and begins them
as late as it can, is given the room that the budget leaves. Compiled: ``native/placing.hpp`` says how.

Bytes only move into room that the schedule leaves: a peak within the budget stays there.
"""

from __future__ import annotations

from lowtide.ir import Costs, Graph, Schedule
from lowtide.solve.moving.steps import decoded, encoded, place_steps, program_of


def place_transfers(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` with its transfers, and collectives that run beside computing, where they are waited for least, and without
    transfers that are needless."""
    if not (schedule.moves or costs.collectives_beside):
        return schedule
    return decoded(place_steps(program_of(graph, costs), encoded(schedule), budget_bytes)[0])
