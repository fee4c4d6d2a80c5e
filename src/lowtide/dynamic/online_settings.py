"""What a context of the online mode was asked for, and what all times that it is entered share."""

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
    """The arguments of ``lowtide.online``, checked. ``habits``: what is known of the program; ``None``: nothing is planned.
    All times that the context is entered share ``observed``, what is known of its operators' memory, ``operators``, them by the
    addresses of overloads that they hold, and ``experience`` of rebuilds. ``may_exceed``: where nothing more can be evicted,
    the program goes on above the budget; or, with ``refuses_once``, does after an error."""

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
