"""List what a Python object directly holds. All code that walks object graphs uses this module; depth and number are unlimited.

A *holder* is an object of a type of Python's (or NumPy's) that is fully described by its content: a container, an array, a
bound method, a weak reference. Anything else with attributes is an *object*: a program depends only on those of its attributes
that the model's code reads (``guards.observe``).
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import enum
import functools
import inspect
import logging
import random
import struct
import threading
import types
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.objects import opaque


class _Absent(enum.Enum):
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT  # stands for the value of an attribute that does not exist
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
CONTAINERS = (list, tuple, deque, set, frozenset, dict)
MUTABLE = (list, deque, dict, set)
_BUILTINS = vars(builtins)
OWN = frozenset(vars(nn.Module()))  # attributes that every module has
_BESIDE = (*PLAIN, *CONTAINERS, types.FunctionType, functools.partial)
CLOSED = (
    nn.Module, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, np.ndarray, types.ModuleType, types.FunctionType,
    types.MethodType, type,
)  # fmt: skip


def _bytes(value: Any) -> tuple[Any, ...]:
    view = memoryview(value)
    return view.format, bytes(view.cast("B")), getattr(value, "_objects", None)  # the target of a ctypes pointer


def _array(value: np.ndarray) -> tuple[Any, ...]:
    plain = np.asarray(value)
    items = plain.ravel().tolist() if value.dtype.hasobject else [plain.tobytes()]
    fields = str(value.dtype) if value.dtype.names else value.dtype.str
    own = (value.shape, value.strides, value.flags.writeable, fields)
    return *own, *items, *(_namespace(value) if hasattr(value, "__dict__") else ())


def _variable(value: contextvars.ContextVar[Any]) -> tuple[Any, ...]:
    try:
        return (value.get(),)
    except LookupError:
        return ()


def _referent(value: Any) -> tuple[Any, ...]:
    """The object behind a weak proxy, found through a bound method, since a proxy forwards every attribute access."""
    try:
        return (value.__init__.__self__,)
    except ReferenceError:
        return ()


def _entries(value: Any) -> tuple[Any, ...]:
    """Keys and values of a dictionary; nothing for ``builtins``, which every namespace refers to: code names what it uses."""
    return () if value is _BUILTINS else (*value.keys(), *value.values())


def _namespace(value: Any) -> tuple[Any, ...]:
    return (*vars(value).keys(), *vars(value).values())


def _state_of_generator(value: Any) -> tuple[Any, ...]:
    frame = value.gi_frame
    return () if frame is None else (frame.f_lasti, *variables(frame).values())


def variables(frame: types.FrameType) -> dict[str, Any]:
    """The local variables of a running or suspended frame. Clears the dictionary in which Python caches them (``f_locals``),
    because it would keep their values alive for as long as the frame runs."""
    found = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or type(found) is not dict:
        return dict(found)
    taken = found.copy()
    found.clear()
    return taken


def _items_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Iterate with the method of the built-in base ``kind``, bypassing a subclass's own ``__iter__`` and ``__len__``."""
    return lambda value: tuple(kind.__iter__(value))


def _logger(value: logging.Logger) -> tuple[Any, ...]:
    above: list[Any] = [value]
    while above[-1].propagate and above[-1].parent is not None:
        above.append(above[-1].parent)
    level = value.level, value.getEffectiveLevel(), value.disabled, value.manager.disable
    called = (*value.filters, *(handler for one in above for handler in one.handlers))
    return (*level, len(above), *map(id, called))  # ids only: the caller does not see what handlers do with a message


GENERATORS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # the global generators of Python and NumPy
OWN_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_HOLDERS: tuple[tuple[Any, Callable[[Any], tuple[Any, ...]]], ...] = (
    (deque, lambda value: (value.maxlen, *value)),
    *(((kind,), _items_of(kind)) for kind in (list, tuple, set, frozenset)),
    (defaultdict, lambda value: (value.default_factory, *value.keys(), *value.values())),
    ((dict, types.MappingProxyType), _entries),
    (functools.partial, lambda value: (value.func, value.args, value.keywords)),
    (types.MethodType, lambda value: (value.__self__, value.__func__)),
    (types.BuiltinMethodType, lambda value: (value.__self__, value.__name__)),
    (weakref.ref, lambda value: (value(),)),
    (weakref.ProxyType, _referent),
    (contextvars.ContextVar, _variable),
    (np.ndarray, _array),
    (memoryview, lambda value: (value.format, value.shape, value.tobytes())),
    (type(threading.Lock()), lambda value: (value.locked(),)),
    (logging.Logger, _logger),
    ((types.SimpleNamespace, threading.local), _namespace),
    (types.CellType, lambda value: (cell_value(value),)),
    (types.GeneratorType, _state_of_generator),
    (BaseException, lambda value: (value.args, value.__cause__, *_namespace(value))),
)
# Modules and packages whose objects are treated as holders of their attributes.
_WHOLE = ("torch.optim.", "torch.distributions.", "torch.utils.data.", "torch.amp.grad_scaler", "threading")


@functools.lru_cache(maxsize=1 << 12)
def _reader(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    read = next((read for kinds, read in _HOLDERS if issubclass(kind, kinds)), None)
    return _namespace if read is None and kind.__dictoffset__ and str(kind.__module__).startswith(_WHOLE) else read


def content(value: Any) -> tuple[Any, ...] | None:
    """The content of a holder, in order (a dictionary's keys and values; an array's shape, type and bytes), or ``None`` if
    ``value`` is not a holder. A program cannot tell apart two holders of one type with the same content."""
    kind: Any = type(value)
    read = _reader(kind)
    if read is not None:
        return read(value)
    if any(value is generator for generator in GENERATORS):  # their draws are tracked separately
        return None
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, type, types.FunctionType, types.ModuleType)):
        return None
    try:
        return (kind.__name__, *_bytes(value))
    except (TypeError, ValueError, BufferError):
        return opaque.state(value) if opaque.is_of_c(kind) else None


def exact(value: Any) -> Any:
    """A key of a plain value, equal for values of one type that no code can tell apart; it separates ``0.0`` from ``-0.0``."""
    if isinstance(value, float):
        return struct.pack("d", value)
    return struct.pack("dd", value.real, value.imag) if isinstance(value, complex) else value


def beside(value: Any) -> dict[str, Any]:
    """The extra attributes (``__dict__``) of a plain value, container, function or partial; empty for anything else."""
    kind = type(value)
    if not kind.__dictoffset__ or isinstance(value, enum.Enum) or not isinstance(value, _BESIDE):
        return {}
    return own_attributes(value) or {}


def cell_value(cell: types.CellType) -> Any:
    """The value in a closure cell, or ``ABSENT`` if the cell is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def class_attribute(kind: type, name: str) -> Any:
    """The raw attribute ``name`` (no descriptor is invoked) of the first class in the MRO that has it, or ``ABSENT``."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), ABSENT)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Like ``isinstance``, without asking the value for its class: some proxies raise an error then, or warn."""
    return issubclass(type(value), kinds)


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The ``__dict__`` of an object, bypassing its class's ``__getattribute__``; ``None`` if it has none."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return own if isinstance(own, dict) else None


def reachable(roots: Iterable[Any], enter: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield ``roots`` and everything reachable from them, each object once, skipping plain values. The walk goes into an object
    only if ``enter`` returns true for it."""
    seen: dict[int, Any] = {}
    waiting = [*roots]
    while waiting:
        value = waiting.pop()
        if not isinstance(value, PLAIN) and id(value) not in seen:
            seen[id(value)] = value
            yield value
            if enter(value):
                held = content(value)
                waiting += fields(value).values() if held is None else held


def closed_over(function: types.FunctionType) -> tuple[Any, ...]:
    """The values in a function's closure cells, and its default arguments."""
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return *map(cell_value, function.__closure__ or ()), *defaults


def functions_in(roots: Iterable[Any], enter: Callable[[Any], bool]) -> list[types.FunctionType]:
    """All functions reachable from ``roots`` (see ``reachable``), including through the closures and defaults of functions."""
    found: dict[int, types.FunctionType] = {}
    waiting: list[Iterable[Any]] = [roots]
    while waiting:
        for one in reachable(waiting.pop(), enter):
            if isinstance(one, types.FunctionType) and id(one) not in found:
                found[id(one)] = one
                waiting.append(closed_over(one))
    return [*found.values()]


def parts_of(value: Any) -> Iterator[Any]:
    """Yield ``value`` and everything in nested containers of it, except plain values."""
    return reachable([value], lambda one: isinstance(one, CONTAINERS))


def items(container: Any) -> list[Any]:
    """The items of a container; for a dict, its keys and values."""
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*iter(container)]


def refill(container: Any, others: Any) -> None:
    """Replace the items of a container by ``others``, in place."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(others)


def is_open(value: Any) -> bool:
    """Whether ``value`` is an object whose attributes are walked, such as a configuration."""
    if isinstance(value, (*PLAIN, *CONTAINERS, *CLOSED)) or getattr(type(value), "_lowtide_runtime", False):
        return False  # a planned forward kept by a wrapper is not part of the model's state
    return bool(fields(value))


def fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, slots included, bypassing its class's ``__getattribute__``, which may raise (as some
    configurations do)."""
    own = getattr(value, "__dict__", None)
    return {**(own if type(own) is dict else {}), **in_slots(value)}


def in_slots(value: Any) -> dict[str, Any]:
    """The values in an object's slots, by name, bypassing its class's ``__getattribute__``."""
    found = {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                # Python mangles a private name (two leading underscores) with the class's name.
                hidden = name.startswith("__") and not name.endswith("__")
                name = f"_{base.__name__.lstrip('_')}{name}" if hidden else name
                with contextlib.suppress(AttributeError):
                    found[name] = object.__getattribute__(value, name)
    return found
