"""A cell of a comparison in a process of its own, ended at a time limit."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import time
from pathlib import Path

from lowtide.ir import load_instance
from lowtide.report.comparison import FAILED, OVER_TIME, Cell, Task, run_cell

_START_SECONDS = 60.0  # for importing, loading and connecting; a planner's time begins after that
_GRACE_SECONDS = 0.5


def run_limited(path: str | Path, task: Task, limit_seconds: float) -> Cell:
    """Answer ``task`` about the instance in ``path`` in a fresh process; ``over time`` where it takes longer.

    The limit covers the planner and the check of its schedule, not the start of the process. ``cpu_seconds`` is set.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(str(path), task, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_START_SECONDS):
            return task.cell(FAILED, message="its process did not start")
        receiver.recv()  # begun
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
    sender.send("begun")
    began, cpu_began = time.perf_counter(), _cpu_seconds()
    cell = run_cell(graph, costs, task)
    seconds, cpu = time.perf_counter() - began, _cpu_seconds() - cpu_began
    sender.send(dataclasses.replace(cell, seconds=round(seconds, 3), cpu_seconds=round(cpu, 3)))


def _cpu_seconds() -> float:
    """Of this process and of those children that have ended."""
    return sum(os.times()[:4])
