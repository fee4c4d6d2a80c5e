"""Copy objects, and container subclasses, bypassing methods that their classes override for copying, reading and filling.
Deep-copy NumPy arrays with their memory layout."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowtide.objects.walk import beside, fields

_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, tuple)  # subclasses before their base (``dict``)
_lock, _inside = threading.Lock(), 0
_MOST_SPREAD, _MOST_BYTES = 16, 1 << 16  # copy a view's whole memory if at most 16 times the view's size, or 64 KiB


def base_of(node: Any) -> Any:
    """The built-in list, tuple or dictionary type that ``node`` is an instance of, or ``None``."""
    return next((base for base in _BASES if isinstance(node, base)), None)


def items_of(node: Any) -> Any:
    """The items of a list, tuple or dictionary (or subclass) as a plain built-in container; ``None`` for anything else."""
    base = base_of(node)
    if base is None:
        return None
    return dict(base.items(node)) if issubclass(base, dict) else base(base.__iter__(node))


def has_more(container: Any) -> bool:
    """Whether a container has attributes that are not also its items. (Transformers' outputs mirror each item in one.)"""
    more = beside(container)
    held = items_of(container) if more and isinstance(container, dict) else {}
    return any(held.get(name, container) is not value for name, value in more.items())


def empty(like: Any, items: Any = ()) -> Any:
    """A new empty container of the class of ``like``, without attributes. A tuple is made with ``items``, as it cannot be
    filled later."""
    base = base_of(like)
    if base is tuple:
        return tuple.__new__(type(like), items)
    made = base.__new__(type(like))
    if getattr(like, "__dict__", None) is like:  # a dictionary that is its own ``__dict__``
        made.__dict__ = made
    if base is defaultdict:
        made.default_factory = like.default_factory
    return made


def fill(made: Any, items: Any) -> None:
    """Put ``items`` into an empty list or dictionary, with the methods of the built-in base."""
    base = base_of(made)
    if base is list:
        list.extend(made, items)
    else:
        for key, item in items.items():
            base.__setitem__(made, key, item)


def copied(node: Any) -> Any:
    """A shallow copy. Bypasses a class's own ``__copy__``, which may also copy a store and tell it of its new owner."""
    kind: Any = type(node)
    if not hasattr(kind, "__copy__") or kind.__new__ is not object.__new__:
        return copy.copy(node)
    clone = kind.__new__(kind)
    for name, value in fields(node).items():
        object.__setattr__(clone, name, value)
    return clone


@contextlib.contextmanager
def arrays_as_they_lie() -> Iterator[None]:
    """Inside the context, in all threads, deep copies of arrays keep the originals' strides, writability, and memory shared
    with other arrays."""
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
    """A copy, as bytes, of the memory of the array ``whole`` (the base of views), or ``None`` if it cannot be copied densely or
    is much larger than the ``used`` bytes."""
    first, end = _bounds(whole)
    if ("memory", id(whole)) not in memo and end - first <= max(_MOST_BYTES, _MOST_SPREAD * used):
        if whole.base is None:
            own = copy.deepcopy(whole, memo)
            own.setflags(write=True)  # a writable view may have a base that became read-only later
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
    """The address of an array's lowest byte, and that one past its highest."""
    spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    first = _address(array)
    return first + sum(one for one in spans if one < 0), first + sum(one for one in spans if one > 0) + array.itemsize
