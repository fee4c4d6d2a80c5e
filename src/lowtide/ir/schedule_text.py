"""Text form of schedules, for reading, diffing and golden tests. ``parse_schedule(format_schedule(x)) == x``.

Grammar, one item per line::

    schedule ::= step* "|" step*
    step     ::= "compute" int ["into s"int] | "free s"int | "save_rng" int | "restore_rng" int

Empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

import re

from lowtide.errors import PlanError
from lowtide.ir.cursor import lines
from lowtide.ir.schedule import Schedule, Step
from lowtide.ir.serial import STEPS, step_to_json

_STEP = re.compile(r"(compute) (\d+)(?: into s(\d+))?|(free) s(\d+)|(save_rng|restore_rng) (\d+)", re.ASCII)


def format_schedule(schedule: Schedule) -> str:
    """The text of ``schedule``, a step per line."""
    text = [_format_step(step) for step in schedule.steps]
    text.insert(schedule.boundary, "|")
    return "\n".join(text) + "\n"


def _format_step(step: Step) -> str:
    kind, number, *into = step_to_json(step)
    text = f"{kind} s{number}" if kind == "free" else f"{kind} {number}"
    return text + "".join(f" into s{storage}" for storage in into)


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``. Raises ``PlanError`` naming the line that is wrong."""
    steps: list[Step] = []
    boundaries: list[int] = []
    for number, line in lines(text):
        if line == "|":
            boundaries.append(len(steps))
        elif match := _STEP.fullmatch(line):
            kind, *numbers = (part for part in match.groups() if part)
            steps.append(STEPS[kind](*map(int, numbers)))
        else:
            raise PlanError(
                f"line {number}: {line[:100]!r} is not a step; steps are compute, free, save_rng and restore_rng."
            )
    if len(boundaries) != 1:
        raise PlanError(f"a schedule has one boundary line '|', this one has {len(boundaries)}.")
    return Schedule(tuple(steps), boundaries[0])
