"""Schedules as commands write them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.ir import Schedule


def write_schedule(schedule: Schedule, path: str) -> None:
    from lowtide.ir.serial import schedule_to_json
    from lowtide.store import write_atomically

    write_atomically(Path(path), json.dumps(schedule_to_json(schedule)))
    print(f"schedule written to {path}", file=sys.stderr)


def schedule_steps(schedule: Schedule) -> list[list[Any]]:
    from lowtide.ir.serial import schedule_to_json

    steps: list[list[Any]] = schedule_to_json(schedule)["steps"]
    return steps
