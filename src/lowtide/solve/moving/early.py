"""Collectives that run beside computing, moved one by one to earlier places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lowtide.ir import Costs, Graph, Schedule
from lowtide.native import core
from lowtide.solve.moving.steps import FREE, STATES, Program, Steps, decoded, encoded, program_of, run_steps

_ATTEMPTS, _WORK = 2000, 400_000  # most moves that are tried, and steps of schedules that are run
_EACH = 16  # up to so many places, each is tried
_COLLECTIVE = 2  # the number of the lane


def improved(graph: Graph, costs: Costs, schedule: Schedule, budget_bytes: int) -> Schedule:
    """``schedule`` after moves of single collectives to earlier places, each of which shortens the time by the
    clock."""
    program, steps = program_of(graph, costs), encoded(schedule)
    start, best = steps, run_steps(program, steps)
    left = min(_ATTEMPTS, _WORK // max(len(steps.rows), 1))
    while left > 0:
        found = steps
        for moved in _moves(program, steps):
            left -= 1
            run = run_steps(program, moved)
            if run.peak_bytes <= budget_bytes and run.time_ns < best.time_ns:
                found, best = moved, run
            if left <= 0:
                break
        if found is steps:
            break
        steps = found
    return schedule if steps is start else decoded(steps)


def _moves(program: Program, steps: Steps) -> Iterator[Steps]:
    """For every collective: the steps with it a few places earlier, twice as many, and so on, and with those before it
    on its lane no later than it."""
    items = [
        (position, low) for position, lane, low in core.movable_steps(program, steps).tolist() if lane == _COLLECTIVE
    ]
    kinds = steps.rows[:, 0]
    after_state = np.concatenate(([False], np.isin(kinds[:-1], STATES)))
    may_precede = ~after_state & (kinds != FREE)
    for number, (position, least) in enumerate(items):
        distance = 1
        while position - distance >= least:
            place = position - distance
            before = [one for one in items[:number] if one[0] >= place]
            if all(low <= place for _, low in before) and may_precede[place]:
                yield _earlier(steps, place, [*(one for one, _ in before), position])
            distance += 1 if distance < _EACH else distance


def _earlier(steps: Steps, place: int, moved: list[int]) -> Steps:
    """The steps with the ``moved`` ones, which come later, before the step at ``place``."""
    order = np.arange(len(steps.rows))
    stay = np.delete(order[place:], np.array(moved) - place)
    boundary = (
        steps.boundary if steps.boundary <= place else int(steps.boundary + sum(one >= steps.boundary for one in moved))
    )
    return Steps(steps.rows[np.concatenate((order[:place], moved, stay))], boundary)
