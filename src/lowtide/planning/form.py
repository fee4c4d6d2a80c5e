"""The fields of ``lowtide-plan/1`` that are read."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

Amount = Annotated[int, Meta(ge=0, le=1 << 62)]  # bytes or nanoseconds, up to the largest budget
Column = Annotated[list[Annotated[int, Meta(ge=0, le=1 << 50)]], Meta(max_length=1 << 24)]


class CostsForm(msgspec.Struct, frozen=True):
    """Separate costs, for readers that have the program."""

    time_ns: Column
    workspace_bytes: Column
    storage_bytes: Column
    rng_state_bytes: Amount
    device: str
    second_memory: Any = None
    collectives_beside: bool = False


class PlanForm(msgspec.Struct, frozen=True):
    """The fields of ``lowtide-plan/1`` that are read. Fields that follow from the schedule are computed again."""

    planner: str
    seed: Annotated[int, Meta(ge=0)]
    budget_bytes: Annotated[int, Meta(ge=1, le=1 << 62)]
    lower_bound_ns: Amount | None
    solve_seconds: Annotated[float, Meta(ge=0, le=1e9)]
    schedule: Any
    graph: Any = None
    costs: CostsForm | None = None
    curve: Any = None
    outside: str = ""
    in_flight: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    waiting_bytes: Amount = 0
