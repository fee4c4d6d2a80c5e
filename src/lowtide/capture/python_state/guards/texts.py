"""Stand-ins for strings that change from call to call, such as file names. A string that no code inspects during the trace
cannot affect the program."""

from __future__ import annotations

from typing import Any

_OWN = frozenset(("value", "comparisons", "operations"))
_OF_OBJECTS = frozenset((
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__"),
    *("__sizeof__", "__module__"),
))  # fmt: skip
_KINDS = 32


class TextStandIn:
    """Replaces a string during a trace; any look at it counts as misuse. ``__class__`` reports the string's type, but C
    functions raise errors that name the true class. There are several such classes, to tell which string an error is
    about."""

    _lowtide_runtime = True  # object walks do not enter it

    def __init__(self, value: Any, comparisons: Any, operations: Any) -> None:
        for name, given in (("value", value), ("comparisons", comparisons), ("operations", operations)):
            object.__setattr__(self, name, given)

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return type(object.__getattribute__(self, "value"))
        return object.__getattribute__(self, name) if name in _OWN else _misused(self)


def _misused(text: Any, *_: Any, **__: Any) -> Any:
    text.comparisons.used_otherwise = True
    raise TypeError("the text was looked at")


for _name in {*dir(str), *dir(bytes), "__bool__", "__int__", "__float__", "__index__", "__fspath__", "__setattr__"}:
    if _name.startswith("__") and _name not in _OF_OBJECTS:
        setattr(TextStandIn, _name, _misused)

TEXT_STAND_INS = tuple(type(f"TextStandIn{number:02}", (TextStandIn,), {}) for number in range(_KINDS))


def text_stand_in(place: int) -> type[TextStandIn]:
    """The stand-in class for the text with index ``place``; classes are reused cyclically."""
    return TEXT_STAND_INS[place % len(TEXT_STAND_INS)]


def named_in(error: BaseException | None) -> frozenset[type]:
    """The stand-in classes named in an error's message or in those of the errors that led to it."""
    found: set[type] = set()
    while error is not None:
        found.update(kind for kind in TEXT_STAND_INS if kind.__name__ in str(error))
        error = error.__cause__ or error.__context__
    return frozenset(found)
