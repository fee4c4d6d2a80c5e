"""Objects that are made in C: no attribute read of theirs is seen, so all that there is to tell of them counts.

That is the state from which they could be made again, where they say it, or else what the garbage collector finds in them or
their attributes show. Of those that tell nothing a program cannot know when they change (``is_unknown``).
"""

from __future__ import annotations

import contextvars
import copyreg
import ctypes
import datetime
import decimal
import functools
import gc
import io
import operator
import os
import re
import struct
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

_OF_C = 1 << 8  # the flag of classes that Python code cannot change
_COLLECTED = 1 << 14  # the flag of classes whose objects tell the garbage collector what they hold
# Made anew wherever they are asked for.
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_OF_LIBRARY: Any = type(ctypes.pythonapi.Py_IsInitialized).__mro__[1]  # functions of a shared library
_SHOWN = (types.GetSetDescriptorType, types.MemberDescriptorType)
_HIDDEN = {"__class__", "__dict__", "__doc__", "__weakref__"}
_STATELESS = getattr(object, "__getstate__", None)
# What nobody changes, or nobody reads anything of.
CONSTANT = (
    types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    *_SHOWN, type(...), type(NotImplemented), types.GenericAlias, types.UnionType, range, re.Pattern, struct.Struct,
    types.FrameType, types.TracebackType, contextvars.Token, np.dtype, type(threading.RLock()), type(functools.cache(len)),
)  # fmt: skip
_LIBRARIES = ("torch", "numpy")
_KNOWN = ("builtins", "types", "functools", "itertools", "operator", "re", "_thread", "_multiprocessing")
# Of objects that hold the same for ever, whatever that is.
FIXED = (
    property, staticmethod, classmethod, slice, types.MethodWrapperType, datetime.date, datetime.time, datetime.tzinfo,
    datetime.timedelta, decimal.Decimal, operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
_ELSEWHERE = ("sqlite3", "_socket")  # modules whose objects show what is not in this process


def is_of_c(kind: Any) -> bool:
    """Whether objects of the class are made in C, and Python code cannot say what reading them does."""
    return bool(kind.__flags__ & _OF_C)


def state(value: Any) -> tuple[Any, ...] | None:
    """What there is to tell of an object made in C; ``None`` where it is constant, or tells nothing."""
    kind: Any = type(value)
    if issubclass(kind, CONSTANT) or _root(kind) == "torch":
        return None
    if issubclass(kind, io.IOBase) and not hasattr(kind, "getvalue"):
        return _of_file(value)
    if getattr(kind, "__getstate__", _STATELESS) is not _STATELESS:  # of a stream in memory, or an XML element
        found = value.__getstate__()
        if found is not None:
            return (found,)
    # Others may write down all that they have.
    brief = _root(kind) in sys.stdlib_module_names or _root(kind) in _LIBRARIES
    made = _made_of(value) if brief else None
    return _held_by(value) if made is None else made


def is_unknown(value: Any, items: tuple[Any, ...] | None) -> bool:
    """Whether nothing shows what code reads of it, nor do its ``items``; or whether reading it takes that away for good."""
    kind: Any = type(value)
    if isinstance(value, types.GeneratorType):
        return value.gi_frame is not None
    if isinstance(value, _OF_LIBRARY) or any(_root(base) in _ELSEWHERE for base in kind.__mro__):
        return True
    if not is_of_c(kind) or issubclass(kind, (*CONSTANT, io.IOBase)) or _root(kind) in _LIBRARIES:
        return False
    if isinstance(value, Iterator):
        return _made_of(value) is None
    return items is None and _root(kind) not in _KNOWN and _made_of(value) is None


def is_told_by_parts(items: tuple[Any, ...] | None, value: Any) -> bool:
    """Whether the ``items`` of an object are what the collector finds in it, which only its own code may change."""
    return items is not None and items[:1] == (id(value),)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _made_of(value: Any) -> tuple[Any, ...] | None:
    """The function that makes such an object, its arguments, and what else there is to say."""
    kind: Any = type(value)
    own = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    make = copyreg.dispatch_table.get(kind) or (operator.methodcaller("__reduce_ex__", 2) if own else None)
    try:
        made = None if make is None else make(value)
    except Exception:  # noqa: BLE001  # a class of anybody's, which may refuse in any way
        return None
    return made if isinstance(made, tuple) else None


def _held_by(value: Any) -> tuple[Any, ...] | None:
    """The object itself, by a number, and the objects that it holds, or that its attributes show."""
    kind: Any = type(value)
    if kind.__flags__ & _COLLECTED:
        own = getattr(value, "__dict__", None)
        found = [one for one in gc.get_referents(value) if one is not kind and one is not own]
    else:
        found = _shown_by(value) if _root(kind) in ("builtins", "numpy") else []
    if not found:
        return (id(value),) if isinstance(value, Iterator) else None
    return tuple(found) if issubclass(kind, _VIEWS) else (id(value), *found)


def _shown_by(value: Any) -> list[Any]:
    names = [name for base in type(value).__mro__ for name, one in vars(base).items() if isinstance(one, _SHOWN)]
    found = []
    for name in dict.fromkeys(names):
        if name not in _HIDDEN:
            with suppress(Exception):
                found.append(getattr(value, name))
    return found


def _of_file(stream: Any) -> tuple[Any, ...] | None:
    """Of a file that is read: where in it the next read is, and whether somebody has written to it since."""
    try:
        if stream.writable() or not stream.seekable():
            return None
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file of the system's
        return None
    return id(stream), _position(stream), found.st_mtime_ns, found.st_size


def _position(stream: Any) -> Any:
    try:
        return stream.tell()
    except OSError:  # of a text whose lines are gone through nobody knows
        return object()
