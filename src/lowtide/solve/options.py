"""Options of planners: what lies out of range is refused with a message that says what may stand there."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.errors import PlanError


def require(holds: bool, planner: str, option: str, value: object, rule: str, example: object) -> None:
    """Raises ``PlanError`` unless ``holds``: ``rule`` says what may stand there, ``example`` is a value that may."""
    if not holds:
        raise PlanError(f"{planner}: {option} is {value}, but {rule}; '{planner}{{{option}={example}}}'")


def require_range(planner: str, option: str, value: int, low: int, high: int, example: int) -> None:
    """Raises ``PlanError`` unless ``low <= value <= high``."""
    if not low <= value <= high:
        raise PlanError(
            f"{planner}: {option} is {value}, but goes from {low} to {high}; "
            f"write for instance '{planner}{{{option}={example}}}'"
        )


def require_one_of(planner: str, option: str, value: str, known: Sequence[str], example: str) -> None:
    """Raises ``PlanError`` unless ``value`` is known."""
    if value not in known:
        raise PlanError(
            f"{planner}: {option} is {value!r}, not one of {', '.join(known)}; '{planner}{{{option}={example}}}'"
        )
