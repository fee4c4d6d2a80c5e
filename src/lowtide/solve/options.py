"""Options of planners: what lies out of range is refused with a message that says what may stand there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from lowtide.errors import PlanError

Value = TypeVar("Value")


def option(default: Value, holds: Callable[[Value], bool], rule: str) -> Value:
    """A field of which ``holds``; ``rule`` says so in words."""
    found: Value = dataclasses.field(default=default, metadata={"holds": holds, "rule": rule})
    return found


def between(default: int, low: int, high: int) -> int:
    return option(default, lambda value: low <= value <= high, f"goes from {low} to {high}")


def one_of(default: str, known: Sequence[str]) -> str:
    return option(default, known.__contains__, f"must be one of {', '.join(known)}")


def above_zero(default: float) -> float:
    return option(default, lambda value: value > 0, "must be above 0")


class Options:
    """The base of a planner's dataclass, which refuses options out of range. Raises ``PlanError``."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """The planner's."""
        return re.sub("(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    def __post_init__(self) -> None:
        planner = self.name
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name.replace("_", "-"), getattr(self, field.name)
            if field.metadata and not field.metadata["holds"](value):
                rule, example = field.metadata["rule"], f"{planner}{{{name}={field.default}}}"
                raise PlanError(f"{planner}: {name} is {value}, but {rule}; write for instance {example!r}")
