"""Functions that read the fields of a JSON object. Each raises ``PlanError`` naming the field that is wrong."""

from __future__ import annotations

import itertools
import reprlib
from typing import Any

from lowtide.errors import PlanError

GRAPH_FORMAT = "lowtide-graph/1"
SCHEDULE_FORMAT = "lowtide-schedule/1"
DAG_FORMAT = "lowtide-dag/1"
SECOND = {GRAPH_FORMAT: "lowtide-graph/2", SCHEDULE_FORMAT: "lowtide-schedule/2", DAG_FORMAT: "lowtide-dag/2"}
"""The formats of what moves storages to a second memory, or has collectives that may run again; readers take either."""
_LARGEST = 2**50  # a pebibyte, or 13 days in nanoseconds


def shown(value: Any) -> str:
    """Return a shortened ``repr`` of ``value`` for an error message."""
    shortened = reprlib.repr(value)
    return shortened if len(shortened) <= 80 else f"{shortened[:80]}..."


def format_of(form: str, second: bool) -> str:
    """Return the format to write: version 2 if ``second``, else version 1, which older readers understand too."""
    return SECOND[form] if second else form


def expect_format(data: Any, *wanted: str) -> None:
    """Raise ``PlanError`` unless ``data`` is an object in one of the ``wanted`` formats, in either version."""
    wanted = tuple(
        itertools.chain.from_iterable((form, SECOND[form]) if form in SECOND else (form,) for form in wanted)
    )
    formats = " or ".join(map(repr, wanted))
    if not isinstance(data, dict):
        raise PlanError(f"expected an object of format {formats}, found a {type(data).__name__}.")
    if data.get("format") not in wanted:
        raise PlanError(f"expected format {formats}, found {shown(data.get('format'))}.")


def count(number: Any, what: str) -> int:
    """Return ``number`` as an ``int`` if it is whole and at least 0; ``5.0`` is whole too."""
    whole = isinstance(number, (int, float)) and not isinstance(number, bool) and 0 <= number <= _LARGEST
    if not whole or number != int(number):
        raise PlanError(f"{what}: {shown(number)} is not a whole number from 0 to {_LARGEST}.")
    return int(number)


def index(number: Any, size: int, what: str) -> int:
    """Return ``number`` if it is a position in a list of ``size`` entries."""
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < size:
        raise PlanError(f"{what}: {shown(number)} is not an index below {size}.")
    return number


def text(string: Any, what: str) -> str:
    if not isinstance(string, str):
        raise PlanError(f"{what}: {shown(string)} is not a string.")
    return string


def truth(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{what} is {shown(value)}, not true or false.")
    return value
