"""Shallow copies of objects, and containers of classes of their own: past what these classes make of copying, reading and
filling them."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

from lowtide.objects.walk import fields

_BASES: tuple[Any, ...] = (OrderedDict, defaultdict, dict, list, tuple)  # the last one that fits is of none before


def _base(node: Any) -> Any:
    return next((base for base in _BASES if isinstance(node, base)), None)


def items_of(node: Any) -> Any:
    """What is in a list, a tuple or a dictionary, in one of Python's own; ``None`` for anything else."""
    base = _base(node)
    if base is None:
        return None
    return dict(base.items(node)) if issubclass(base, dict) else base(base.__iter__(node))


def empty(like: Any, items: Any = ()) -> Any:
    """A container of the same class, without attributes; of a tuple, which cannot be filled later, with these items."""
    base = _base(like)
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
    base = _base(made)
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
