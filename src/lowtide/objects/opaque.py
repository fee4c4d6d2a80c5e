"""Determine the state of objects implemented in C. Reads of their attributes cannot be observed, so all of their state counts.

The state is what pickling would use to recreate the object, if the class supports that, else the objects that the garbage
collector finds in it, or its attribute values. If none of these is available, a change cannot be detected (``is_unknown``).
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

_OF_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: Python code cannot change the class
_COLLECTED = 1 << 14  # Py_TPFLAGS_HAVE_GC: objects tell the garbage collector what they refer to
# Views, which are created anew each time.
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_OF_LIBRARY: Any = type(ctypes.pythonapi.Py_IsInitialized).__mro__[1]  # ctypes functions, of a shared library
_SHOWN = (types.GetSetDescriptorType, types.MemberDescriptorType)
_HIDDEN = {"__class__", "__dict__", "__doc__", "__weakref__"}
_STATELESS = getattr(object, "__getstate__", None)
# Types whose objects never change, or have no state that code reads.
CONSTANT = (
    types.CodeType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
    *_SHOWN, type(...), type(NotImplemented), types.GenericAlias, types.UnionType, range, re.Pattern, struct.Struct,
    types.FrameType, types.TracebackType, contextvars.Token, np.dtype, type(threading.RLock()), type(functools.cache(len)),
)  # fmt: skip
_LIBRARIES = ("torch", "numpy")
_KNOWN = ("builtins", "types", "functools", "itertools", "operator", "re", "_thread", "_multiprocessing")
# Types whose objects always hold the same objects (which may themselves change).
FIXED = (
    property, staticmethod, classmethod, slice, types.MethodWrapperType, datetime.date, datetime.time, datetime.tzinfo,
    datetime.timedelta, decimal.Decimal, operator.itemgetter, operator.attrgetter, operator.methodcaller,
)  # fmt: skip
_ELSEWHERE = ("sqlite3", "_socket")  # modules whose objects give access to state outside this process


def is_of_c(kind: Any) -> bool:
    """Whether a class is implemented in C and immutable, so that Python code cannot hook attribute reads of its objects."""
    return bool(kind.__flags__ & _OF_C)


def state(value: Any) -> tuple[Any, ...] | None:
    """The state of an object implemented in C, or ``None`` if it is constant or its state cannot be determined."""
    kind: Any = type(value)
    if issubclass(kind, CONSTANT) or _root(kind) == "torch":
        return None
    if issubclass(kind, io.IOBase) and not hasattr(kind, "getvalue"):
        return _of_file(value)
    if getattr(kind, "__getstate__", _STATELESS) is not _STATELESS:  # an in-memory stream or an XML element
        found = value.__getstate__()
        if found is not None:
            return (found,)
    # Other libraries' reduce methods may serialize large amounts of data.
    brief = _root(kind) in sys.stdlib_module_names or _root(kind) in _LIBRARIES
    made = _made_of(value) if brief else None
    return _held_by(value) if made is None else made


def is_unknown(value: Any, items: tuple[Any, ...] | None) -> bool:
    """Whether neither the object nor its ``items`` show the state that code may read, or reading it consumes that state (as
    with a generator)."""
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
    """Whether the ``items`` of an object are the referents that the garbage collector reports, which only its own code can
    change."""
    return items is not None and items[:1] == (id(value),)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


def _made_of(value: Any) -> tuple[Any, ...] | None:
    """The tuple that pickling would store (constructor, arguments, state ...), or ``None`` if the object cannot be reduced."""
    kind: Any = type(value)
    own = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
    make = copyreg.dispatch_table.get(kind) or (operator.methodcaller("__reduce_ex__", 2) if own else None)
    try:
        made = None if make is None else make(value)
    except Exception:  # noqa: BLE001  # third-party code, which may raise anything
        return None
    return made if isinstance(made, tuple) else None


def _held_by(value: Any) -> tuple[Any, ...] | None:
    """The object's id, and the objects that it refers to or that its attributes show."""
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
    """The state of a file opened for reading: the read position, the modification time and the size."""
    try:
        if stream.writable() or not stream.seekable():
            return None
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or without a file descriptor
        return None
    return id(stream), _position(stream), found.st_mtime_ns, found.st_size


def _position(stream: Any) -> Any:
    try:
        return stream.tell()
    except OSError:  # a text file that is iterated by lines does not tell its position
        return object()
