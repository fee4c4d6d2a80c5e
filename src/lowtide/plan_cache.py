"""Plans on disk: one JSON file per question, so that a second start of the same program does not search again.

A key is the hash of everything that a plan depends on: the graph without the places in the user's files, its costs, the
budget, planner and seed, the versions given, and the sources of the planners themselves. Graph and costs are at hand
when a plan is looked for, so an entry holds the schedule alone. No entry is trusted: its schedule is checked and simulated
like a planner's, and one that is damaged or over the budget is ignored with a log line and written anew. Writing replaces
a file in one step, so that any number of processes may share the folder. The oldest entries go when there are too many.

``LOWTIDE_PLAN_CACHE=0`` turns the cache off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from lowtide.errors import LowtideError, PlanError, ScheduleError
from lowtide.ir import (
    Costs,
    Graph,
    check,
    format_graph,
    keep_all_schedule,
    schedule_from_json,
    schedule_to_json,
    simulate,
)
from lowtide.planning import Plan
from lowtide.store import write_atomically

_LOG = logging.getLogger(__name__)
FORMAT = "lowtide-cached-plan/1"
MOST_ENTRIES = 512
_PLANNER_SOURCES = ("ir", "solve", "eviction")
_OFF = ("0", "off", "false", "no")


def enabled() -> bool:
    """Whether the environment leaves the cache on."""
    return os.environ.get("LOWTIDE_PLAN_CACHE", "").strip().lower() not in _OFF


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """What was asked of a planner. ``versions``: of whatever else the answer depends on, such as torch."""

    graph: Graph
    costs: Costs
    budget_bytes: int
    planner: str
    seed: int
    versions: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Equal for questions that have the same answer, and stable across processes."""
        digest = hashlib.sha256()
        settings = (FORMAT, self.budget_bytes, self.planner, self.seed, self.versions, _planner_sources())
        for part in (repr(settings), format_graph(self.graph.without_places()), self.costs.device):
            digest.update(part.encode() + b"\0")
        for column in (self.costs.time_ns, self.costs.workspace_bytes, self.costs.storage_bytes):
            digest.update(column.tobytes())
        digest.update(str(self.costs.rng_state_bytes).encode())
        return digest.hexdigest()


def load(folder: Path, question: Question) -> Plan | None:
    """The plan kept for ``question``, its schedule checked and simulated; ``None`` where there is none that is sound."""
    path = _path(folder, question)
    try:
        plan = _plan(question, _read(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, LowtideError) as error:
        _LOG.warning("ignoring the cached plan %s: %s", path, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # the entries used last stay longest
    _LOG.info("plan taken from %s", path)
    return plan


def store(folder: Path, question: Question, plan: Plan) -> None:
    """Keep ``plan``. A folder that cannot be written to is logged, not raised: the cache is a convenience."""
    answer = {
        "planner": plan.planner,
        "lower_bound_ns": plan.lower_bound_ns,
        "solve_seconds": plan.solve_seconds,
        "schedule": schedule_to_json(plan.schedule),
    }
    text = json.dumps({"format": FORMAT, "sha256": _digest(answer), "answer": answer})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(folder, question), text)
        _drop_oldest(folder)
    except (OSError, PlanError) as error:
        _LOG.warning("plans cannot be kept in %s: %s", folder, error)


def _path(folder: Path, question: Question) -> Path:
    return folder / f"{question.key[:40]}.json"


def _read(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    answer: dict[str, Any] = data["answer"]
    if data["sha256"] != _digest(answer):
        raise ValueError("it is damaged")
    return answer


def _digest(answer: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def _plan(question: Question, answer: dict[str, Any]) -> Plan:
    graph, costs, bound = question.graph, question.costs, answer["lower_bound_ns"]
    schedule = schedule_from_json(answer["schedule"])
    check(graph, schedule)
    result = simulate(graph, costs, schedule)
    if result.peak_bytes > question.budget_bytes:
        raise ScheduleError(f"it peaks at {result.peak_bytes} bytes, over the budget of {question.budget_bytes}")
    return Plan(
        graph,
        costs,
        schedule,
        str(answer["planner"]),
        question.budget_bytes,
        result.peak_bytes,
        simulate(graph, costs, keep_all_schedule(graph)).peak_bytes,
        result.time_ns,
        None if bound is None else int(bound),
        question.seed,
        float(answer["solve_seconds"]),
        cached=True,
    )


def _drop_oldest(folder: Path) -> None:
    """Leave ``MOST_ENTRIES`` files; another process may remove the same ones meanwhile."""
    ages: list[tuple[int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages, reverse=True)[MOST_ENTRIES:]:
        path.unlink(missing_ok=True)


@functools.cache
def _planner_sources() -> str:
    """One hash of the code that makes plans: a release is not the only thing that changes it."""
    digest = hashlib.sha256()
    for package in _PLANNER_SOURCES:
        for path in sorted((Path(__file__).parent / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()
