"""What planners have in common: options that are refused out of range, with a message that says what may stand there, and that
nothing is searched for where the program as written fits."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from lowtide.errors import PlanError
from lowtide.solve.outcome import keeping_all
from lowtide.solve.problem import Problem, Solution, Status

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
    """The base of a planner's dataclass, whose fields are its options. Raises ``PlanError`` for those out of range."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return re.sub("(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    def solve(self, problem: Problem) -> Solution:
        """The program as written, which is optimal where it fits; else what the planner finds."""
        kept = keeping_all(self.name, problem)
        return kept if kept.status is Status.OPTIMAL else self.search(problem)

    @abc.abstractmethod
    def search(self, problem: Problem) -> Solution:
        """The answer to a problem that the program as written is no answer to."""

    def __post_init__(self) -> None:
        planner = self.name
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name.replace("_", "-"), getattr(self, field.name)
            if field.metadata and not field.metadata["holds"](value):
                rule, example = field.metadata["rule"], f"{planner}{{{name}={field.default}}}"
                raise PlanError(f"{planner}: {name} is {value}, but {rule}; write for instance {example!r}")
