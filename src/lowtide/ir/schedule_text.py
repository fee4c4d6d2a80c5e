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
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step

_STEP = re.compile(r"(compute|save_rng|restore_rng) (\d+)|free s(\d+)|compute (\d+) into s(\d+)", re.ASCII)


def format_schedule(schedule: Schedule) -> str:
    """The text of ``schedule``, a step per line."""
    text = [_format_step(step) for step in schedule.steps]
    text.insert(schedule.boundary, "|")
    return "\n".join(text) + "\n"


def _format_step(step: Step) -> str:
    match step:
        case Compute(op, into):
            return f"compute {op}" if into is None else f"compute {op} into s{into}"
        case Free(storage):
            return f"free s{storage}"
        case SaveRng(op):
            return f"save_rng {op}"
        case RestoreRng(op):
            return f"restore_rng {op}"


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``. Raises ``PlanError`` naming the line that is wrong."""
    steps: list[Step] = []
    boundaries: list[int] = []
    for number, line in lines(text):
        if line == "|":
            boundaries.append(len(steps))
        else:
            steps.append(_parse_step(line, number))
    if len(boundaries) != 1:
        raise PlanError(f"a schedule has one boundary line '|', this one has {len(boundaries)}.")
    return Schedule(tuple(steps), boundaries[0])


def _parse_step(line: str, number: int) -> Step:
    match = _STEP.fullmatch(line)
    if match is None:
        raise PlanError(
            f"line {number}: {line[:100]!r} is not a step; steps are compute, free, save_rng and restore_rng."
        )
    if match[3]:
        return Free(int(match[3]))
    if match[4]:
        return Compute(int(match[4]), int(match[5]))
    kinds: dict[str, type[Compute] | type[SaveRng] | type[RestoreRng]] = {
        "compute": Compute,
        "save_rng": SaveRng,
        "restore_rng": RestoreRng,
    }
    return kinds[match[1]](int(match[2]))
