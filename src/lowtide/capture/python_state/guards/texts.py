"""Texts that are other ones in every call, the names of files say, while one call is traced: what nobody looks at is the same
to the program whatever it is."""

from __future__ import annotations

from typing import Any

_OWN = frozenset(("value", "comparisons", "operations"))
_OF_OBJECTS = frozenset((
    *("__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__"),
    *("__sizeof__", "__module__"),
))  # fmt: skip
_KINDS = 32


class TextStandIn:
    """Stands for a text: whoever looks at it misuses it. Its class says that it is one, but functions of C's that take a text
    raise an error which names the class in truth, so that there are several of these."""

    _lowtide_runtime = True  # nothing to look into

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
    """The class for the text at this place among others."""
    return TEXT_STAND_INS[place % len(TEXT_STAND_INS)]


def named_in(error: BaseException | None) -> frozenset[type]:
    """The kinds of text that an error, or one that led to it, is about."""
    found: set[type] = set()
    while error is not None:
        found.update(kind for kind in TEXT_STAND_INS if kind.__name__ in str(error))
        error = error.__cause__ or error.__context__
    return frozenset(found)
