# ruff: noqa: E501
"""Between two steps something changes that code asks libraries for, or of functions and classes themselves: the next one is as in
eager."""

from __future__ import annotations

import io
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowtide.capture.trace.patches import replaced
from tests.fuzz.changed import Reader, follows

_LOGGER = logging.getLogger("lowtide_test.asked")
_ABSENT = "lowtide_test_absent"


class Base:
    pass


class First(Base):
    scale = 1.0


class Other:
    @staticmethod
    def act(x: float) -> float:
        return x


def act(x: float) -> float:
    return x


def _warned(state: Any) -> float:
    try:
        warnings.warn("of a test", FutureWarning, stacklevel=1)
    except FutureWarning:
        return 2.0
    return 1.0


def _of_first(state: Any) -> float:
    found: float = Base.__subclasses__()[0].scale  # type: ignore[attr-defined]
    return found


_CASES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "module that is there": (lambda s: 1.0 + ("lowtide_test_absent" in sys.modules), lambda: sys.modules.update({_ABSENT: types.ModuleType(_ABSENT)})),
    "list of a library": (lambda s: len(sys.path), lambda: sys.path.append("/lowtide_test")),
    "object of a library": (lambda s: 1.0 + isinstance(sys.stdout, io.StringIO), lambda: setattr(sys, "stdout", io.StringIO())),
    "warnings that are raised": (_warned, lambda: warnings.simplefilter("error", FutureWarning)),
    "handlers of a logger": (lambda s: 1.0 + len(_LOGGER.handlers), lambda: _LOGGER.addHandler(logging.NullHandler())),
    "filters of a logger": (lambda s: 1.0 + len(_LOGGER.filters), lambda: _LOGGER.addFilter(lambda record: True)),
    "handlers of a logger above": (lambda s: 1.0 + len(_LOGGER.parent.handlers), lambda: logging.getLogger("lowtide_test").addHandler(logging.NullHandler())),
    "name of a level": (lambda s: len(logging.getLevelName(17)), lambda: logging.addLevelName(17, "seventeen")),
    "name of a function": (lambda s: len(act.__name__), lambda: setattr(act, "__name__", "activation")),
    "documentation of a function": (lambda s: 1.0 + (act.__doc__ is None), lambda: setattr(act, "__doc__", "As it is.")),
    "annotations of a function": (lambda s: len(act.__annotations__), lambda: act.__annotations__.pop("x")),
    "name of a class": (lambda s: len(type(s).__name__), lambda: setattr(Other, "__name__", "Another")),
    "documentation of a class": (lambda s: 1.0 + (type(s).__doc__ is None), lambda: setattr(Other, "__doc__", "One.")),
    "number of subclasses": (lambda s: len(Base.__subclasses__()), lambda: _SUBCLASSES.append(type("Second", (Base,), {}))),
    "attribute of a subclass": (_of_first, lambda: setattr(First, "scale", 2.0)),
}  # fmt: skip
_SUBCLASSES: list[Any] = []


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    above = logging.getLogger("lowtide_test")
    annotations, path = dict(act.__annotations__), [*sys.path]
    with warnings.catch_warnings(), replaced(sys, "stdout", sys.stdout):
        warnings.simplefilter("ignore", FutureWarning)
        yield
    sys.path[:], act.__name__, act.__doc__, act.__annotations__ = path, "act", None, annotations
    sys.modules.pop(_ABSENT, None)
    _LOGGER.handlers, _LOGGER.filters, above.handlers = [], [], []
    Other.__name__, Other.__doc__, First.scale = "Other", None, 1.0
    _SUBCLASSES.clear()


@pytest.mark.parametrize("name", _CASES)
def test_what_is_asked_of_libraries(name: str) -> None:
    read, change = _CASES[name]
    follows(Reader(Other(), read), lambda model: (change(), None)[1])
