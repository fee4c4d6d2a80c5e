"""Which attributes code names, on whatever object, and whether it reaches more by computed names."""

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
_ANNOTATED = frozenset({"get_type_hints", "get_annotations"})  # Python's functions that read them in many ways
_NO_LOADS = {"CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG"}


class AttributeNames(NamedTuple):
    """The attributes that code names (``named``), including functions that it looks up. ``spelled``: those given as
    strings (``getattr(x, "scale", 1)``). ``computed``: whether it reaches others by computed names. ``elsewhere``:
    whether also on something other than ``self``, such as a module."""

    named: frozenset[str] = frozenset()
    spelled: frozenset[str] = frozenset()
    computed: bool = False
    elsewhere: bool = False


def attribute_names(function: types.FunctionType) -> AttributeNames:
    """The names in the code of a user's function; for functions of Python's own, what they tell about functions and
    classes (``inspect.getdoc``)."""
    if is_installed(function.__code__.co_filename):
        asked = {"__annotations__"} if function.__name__ in _ANNOTATED else set()
        return AttributeNames(frozenset(names_behind(function) & DESCRIBING | asked))
    names = names_in(function.__code__)
    owners = _owners_of_computed(function.__code__) if names.all & BY_COMPUTED_NAME else frozenset()
    return AttributeNames(names.all, names.spelled, bool(owners), bool(owners - {"self"}))


@functools.lru_cache(maxsize=1 << 14)
def _owners_of_computed(code: types.CodeType) -> frozenset[str]:
    """The names of variables whose attributes code reads all at once, or by ``getattr`` with a name that is not
    constant; an empty name for computed objects."""
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
    """The name of the variable that is loaded without looking up an attribute."""
    alone = bool(loads) and loads[-1].opname not in ATTRIBUTE
    return str(loads[0].argval) if alone else ""


def _asks_for_computed(after: Sequence[dis.Instruction]) -> bool:
    """Whether a call of ``getattr`` has a name that is not constant, judged by the instructions ``after`` it is
    loaded."""
    after = [*itertools.dropwhile(lambda one: one.opname in ATTRIBUTE, after[1:])]
    called = [one.arg if one.opname == "CALL" else None for one in after[1:3]]
    return not after or after[0].opname != "LOAD_CONST" or (called[:1] != [2] and called[1:] != [3])
