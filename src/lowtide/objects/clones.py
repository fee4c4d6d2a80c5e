"""Shallow copies of objects, and containers of classes of their own: past what these classes make of copying, reading and
filling them. Deep copies of arrays that lie in memory as these do."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowtide.objects.walk import beside, fields

_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, tuple)  # the last one that fits is of none before
_lock, _inside = threading.Lock(), 0
_MOST_SPREAD, _MOST_BYTES = 16, 1 << 16  # of the memory that an array is a view of, for a copy of that


def base_of(node: Any) -> Any:
    """Which of Python's own lists, tuples and dictionaries it is one of; ``None`` for anything else."""
    return next((base for base in _BASES if isinstance(node, base)), None)


def items_of(node: Any) -> Any:
    """What is in a list, a tuple or a dictionary, in one of Python's own; ``None`` for anything else."""
    base = base_of(node)
    if base is None:
        return None
    return dict(base.items(node)) if issubclass(base, dict) else base(base.__iter__(node))


def has_more(container: Any) -> bool:
    """Whether it has attributes beside what it holds. (Results of Transformers' have each item as an attribute, too.)"""
    more = beside(container)
    held = items_of(container) if more and isinstance(container, dict) else {}
    return any(held.get(name, container) is not value for name, value in more.items())


def empty(like: Any, items: Any = ()) -> Any:
    """A container of the same class, without attributes; of a tuple, which cannot be filled later, with these items."""
    base = base_of(like)
    if base is tuple:
        return tuple.__new__(type(like), items)
    made = base.__new__(type(like))
    if getattr(like, "__dict__", None) is like:  # what is in it are its attributes
        made.__dict__ = made
    if base is defaultdict:
        made.default_factory = like.default_factory
    return made


def fill(made: Any, items: Any) -> None:
    """Put these items into an empty list or dictionary."""
    base = base_of(made)
    if base is list:
        list.extend(made, items)
    else:
        for key, item in items.items():
            base.__setitem__(made, key, item)


def copied(node: Any) -> Any:
    """A shallow copy: a store may be copied along, and be told of its new owner."""
    kind: Any = type(node)
    if not hasattr(kind, "__copy__") or kind.__new__ is not object.__new__:
        return copy.copy(node)
    clone = kind.__new__(kind)
    for name, value in fields(node).items():
        object.__setattr__(clone, name, value)
    return clone


@contextlib.contextmanager
def arrays_as_they_lie() -> Iterator[None]:
    """Inside, in all threads, deep copies of arrays have their strides, share memory where they do, and may be written where
    they may."""
    global _inside
    table: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    with _lock:
        _inside += 1
        table[np.ndarray] = _as_it_lies
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                del table[np.ndarray]


def _as_it_lies(array: np.ndarray, memo: dict[Any, Any]) -> np.ndarray:
    whole: Any = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    owns = whole is array and array.base is None
    memory = None if owns or whole.dtype.hasobject or not array.size else _memory(whole, array.nbytes, memo)
    if memory is None:
        made = array.__deepcopy__(memo)
    else:
        offset = _address(array) - _bounds(whole)[0]
        made = np.ndarray(array.shape, array.dtype, memory, offset, array.strides)
    if made.flags.writeable != array.flags.writeable:
        made.setflags(write=array.flags.writeable)
    return made


def complete_arrays(memo: dict[Any, Any]) -> None:
    """Give copies of arrays of classes of their own, which a deep copy has put into ``memo``, the attributes of the originals:
    NumPy leaves these out."""
    kept = [one for one in memo.get(id(memo), ()) if isinstance(one, np.ndarray) and type(one) is not np.ndarray]
    for array in kept:
        clone, kind = memo.get(id(array)), type(array)
        if type(clone) is kind and kind.__deepcopy__ is np.ndarray.__deepcopy__:
            own = {name: copy.deepcopy(value, memo) for name, value in getattr(array, "__dict__", {}).items()}
            clone.__dict__.update(own) if own else None


def _memory(whole: np.ndarray, used: int, memo: dict[Any, Any]) -> np.ndarray | None:
    """A copy of the memory of an array that others are views of; ``None`` where it is much larger than what they use."""
    first, end = _bounds(whole)
    if ("memory", id(whole)) not in memo and end - first <= max(_MOST_BYTES, _MOST_SPREAD * used):
        if whole.base is None:
            own = copy.deepcopy(whole, memo)
            own.setflags(write=True)  # of a writable view, whose base became read-only later
            flat = own.ravel(order="K").view(np.uint8)
            own.setflags(write=whole.flags.writeable)
        else:
            flat = np.zeros(end - first, np.uint8)
            np.ndarray(whole.shape, whole.dtype, flat, _address(whole) - first, whole.strides)[...] = whole
        memo["memory", id(whole)] = flat if flat.nbytes == end - first else None
    found: np.ndarray | None = memo.get(("memory", id(whole)))
    return found


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """The addresses of its first byte, and behind its last."""
    spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = _address(array)
    return first + sum(one for one in spans if one < 0), first + sum(one for one in spans if one > 0) + array.itemsize
