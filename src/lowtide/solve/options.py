"""The base of planners: options that are refused out of range with a message that names the range, and the rule that nothing
is searched if the program without recomputation fits."""

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
    """Declare an option whose value must satisfy ``holds``; ``rule`` says so in words, for the error message."""
    found: Value = dataclasses.field(default=default, metadata={"holds": holds, "rule": rule})
    return found


def between(default: int, low: int, high: int) -> int:
    return option(default, lambda value: low <= value <= high, f"goes from {low} to {high}")


def one_of(default: str, known: Sequence[str]) -> str:
    return option(default, known.__contains__, f"must be one of {', '.join(known)}")


def above_zero(default: float) -> float:
    return option(default, lambda value: value > 0, "must be above 0")


class Options:
    """Base of a planner's dataclass, whose fields are its options. Raises ``PlanError`` for options out of range."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return re.sub("(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()

    def solve(self, problem: Problem) -> Solution:
        """Return the program without recomputation if it fits, which is optimal; else the answer of ``search``."""
        kept = keeping_all(self.name, problem)
        return kept if kept.status is Status.OPTIMAL else self.search(problem)

    @abc.abstractmethod
    def search(self, problem: Problem) -> Solution:
        """Solve a problem for which the program without recomputation is not known to be optimal."""

    def __post_init__(self) -> None:
        planner = self.name
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            name, value = field.name.replace("_", "-"), getattr(self, field.name)
            if field.metadata and not field.metadata["holds"](value):
                rule, example = field.metadata["rule"], f"{planner}{{{name}={field.default}}}"
                raise PlanError(f"{planner}: {name} is {value}, but {rule}; write for instance {example!r}")
