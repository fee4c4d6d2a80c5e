"""Settings of a context of the online mode, and the state shared by all entries into it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from lowtide.dynamic.executor import Observed
from lowtide.dynamic.habits import Habits
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.rebuild import Experience


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """The checked arguments of ``lowtide.online``. ``habits``: known cycles and plans, ``None`` to plan nothing. All entries
    into the context share ``habits``, ``observed`` (measured costs of operators), ``operators`` (by the ``id`` of their
    overloads, which they keep alive) and ``experience`` of rebuilds. ``may_exceed``: go on above the budget if nothing more
    can be evicted; ``refuses_once``: do so only after a first budget error."""

    budget_bytes: int
    heuristic: str
    policy: str
    sample: bool
    record: str | Path | None
    seed: int
    warn_above: float
    device: torch.device
    habits: Habits | None = None
    observed: Observed = field(default_factory=Observed)
    operators: dict[int, Operator] = field(default_factory=dict, compare=False)
    experience: Experience = field(default_factory=Experience, compare=False)
    may_exceed: bool = False
    refuses_once: bool = False
