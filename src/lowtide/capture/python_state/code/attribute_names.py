"""Which attributes of anything code names, and whether it comes to more by names that it computes."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Sequence
from typing import NamedTuple

from lowtide.capture.python_state.code.asked import names_behind
from lowtide.capture.python_state.code.code_names import ATTRIBUTE, BY_COMPUTED_NAME, LOADING, codes, names_in
from lowtide.capture.python_state.code.installed import is_installed

DESCRIBING = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__annotations__"})  # beside code
_ANNOTATED = frozenset({"get_type_hints", "get_annotations"})  # functions of Python's own that ask in many ways
_NO_LOADS = {"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG"}


class AttributeNames(NamedTuple):
    """``named`` by code, of anything, with the functions that it looks up; those among them that it has ``spelled`` out
    (``getattr(x, "scale", 1)``). ``computed``: whether it comes to others by names that it computes, and ``elsewhere``: whether
    also of something else than its ``self``, a module maybe."""

    named: frozenset[str] = frozenset()
    spelled: frozenset[str] = frozenset()
    computed: bool = False
    elsewhere: bool = False


def attribute_names(function: types.FunctionType) -> AttributeNames:
    """Those in the code of a function of the user's; of one of Python's own what it says of functions and classes
    (``inspect.getdoc``)."""
    if is_installed(function.__code__.co_filename):
        asked = {"__annotations__"} if function.__name__ in _ANNOTATED else set()
        return AttributeNames(frozenset(names_behind(function) & DESCRIBING | asked))
    names = names_in(function.__code__)
    owners = _owners_of_computed(function.__code__) if names.all & BY_COMPUTED_NAME else frozenset()
    return AttributeNames(names.all, names.spelled, bool(owners), bool(owners - {"self"}))


@functools.lru_cache(maxsize=1 << 14)
def _owners_of_computed(code: types.CodeType) -> frozenset[str]:
    """The names of what code reads all attributes of, or asks by ``getattr`` for other names than constants; no name where it
    is computed itself."""
    found = set[str]()
    for part in codes(code):
        loads = [item for item in dis.get_instructions(part) if item.opname not in _NO_LOADS]
        for place, item in enumerate(loads):
            if item.opname not in LOADING or item.argval not in BY_COMPUTED_NAME:
                continue
            if item.argval == "__dict__":
                found.add(_name_of(loads[:place][-1:]))
            elif item.argval != "getattr" or _asks_for_computed(loads[place + 1 :]):
                found.add(_name_of(loads[place + 1 : place + 3]))
    return frozenset(found)


def _name_of(loads: Sequence[dis.Instruction]) -> str:
    """The variable that is loaded, and of which nothing is looked up."""
    alone = bool(loads) and loads[-1].opname not in ATTRIBUTE
    return str(loads[0].argval) if alone else ""


def _asks_for_computed(after: Sequence[dis.Instruction]) -> bool:
    """Whether a call of ``getattr`` has something else than a constant for a name, by what follows where that is loaded."""
    after = [*itertools.dropwhile(lambda one: one.opname in ATTRIBUTE, after[1:])]
    called = [one.arg if one.opname == "CALL" else None for one in after[1:3]]
    return not after or after[0].opname != "LOAD_CONST" or (called[:1] != [2] and called[1:] != [3])
