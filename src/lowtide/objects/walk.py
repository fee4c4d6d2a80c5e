"""The one walk over Python objects: what an object directly holds, without limits of depth or number.

A *holder* is an object of Python's own (or NumPy's) whose content is all there is to it: containers, arrays, bound methods,
weak references. Everything else with attributes is an *object*: what it is to a program is told by the attributes that are
read (``guards.observe``).
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


ABSENT = _Absent.ABSENT  # instead of the value of an attribute that is not there
PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
CONTAINERS = (list, tuple, deque, set, frozenset, dict)
MUTABLE = (list, deque, dict, set)
_BUILTINS = vars(builtins)
OWN = frozenset(vars(nn.Module()))  # what every module has
_BESIDE = (*PLAIN, *CONTAINERS, types.FunctionType, functools.partial)
CLOSED = (
    nn.Module, torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, np.ndarray, types.ModuleType, types.FunctionType,
    types.MethodType, type,
)  # fmt: skip


def _bytes(value: Any) -> tuple[Any, ...]:
    view = memoryview(value)
    return view.format, bytes(view.cast("B")), getattr(value, "_objects", None)  # what a pointer of ctypes points to


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
    """Of a proxy, which passes on all that is asked of it."""
    try:
        return (value.__init__.__self__,)
    except ReferenceError:
        return ()


def _entries(value: Any) -> tuple[Any, ...]:
    """Of Python's own functions, which every namespace has by reference, none: code that uses one names it."""
    return () if value is _BUILTINS else (*value.keys(), *value.values())


def _namespace(value: Any) -> tuple[Any, ...]:
    return (*vars(value).keys(), *vars(value).values())


def _state_of_generator(value: Any) -> tuple[Any, ...]:
    frame = value.gi_frame
    return () if frame is None else (frame.f_lasti, *variables(frame).values())


def variables(frame: types.FrameType) -> dict[str, Any]:
    """What code that runs, or waits, has in its variables. The snapshot that Python takes of them is emptied: it would keep
    what it holds as long as that code goes on."""
    found = frame.f_locals
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED or type(found) is not dict:
        return dict(found)
    taken = found.copy()
    found.clear()
    return taken


def _items_of(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Past what a subclass makes of its length, or of going through it."""
    return lambda value: tuple(kind.__iter__(value))


def _logger(value: logging.Logger) -> tuple[Any, ...]:
    above: list[Any] = [value]
    while above[-1].propagate and above[-1].parent is not None:
        above.append(above[-1].parent)
    level = value.level, value.getEffectiveLevel(), value.disabled, value.manager.disable
    called = (*value.filters, *(handler for one in above for handler in one.handlers))
    return (*level, len(above), *map(id, called))  # by number: what they do with a message is nothing to who sends it


GENERATORS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # those that all share, of Python and of NumPy
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
# Objects that are read as what they hold.
_WHOLE = ("torch.optim.", "torch.distributions.", "torch.utils.data.", "torch.amp.grad_scaler", "threading")


@functools.lru_cache(maxsize=1 << 12)
def _reader(kind: Any) -> Callable[[Any], tuple[Any, ...]] | None:
    read = next((read for kinds, read in _HOLDERS if issubclass(kind, kinds)), None)
    return _namespace if read is None and kind.__dictoffset__ and str(kind.__module__).startswith(_WHOLE) else read


def content(value: Any) -> tuple[Any, ...] | None:
    """What a holder holds, in order: of a dictionary keys and values, of an array its shape, type and bytes; ``None`` for what
    is no holder. Two holders of one type are the same to a program where their contents are."""
    kind: Any = type(value)
    read = _reader(kind)
    if read is not None:
        return read(value)
    if any(value is generator for generator in GENERATORS):  # whose draws are followed by themselves
        return None
    if isinstance(value, (*PLAIN, torch.Tensor, nn.Module, type, types.FunctionType, types.ModuleType)):
        return None
    try:
        return (kind.__name__, *_bytes(value))
    except (TypeError, ValueError, BufferError):
        return opaque.state(value) if opaque.is_of_c(kind) else None


def exact(value: Any) -> Any:
    """Of a plain value: equal for two of one type where no code tells them apart. Zeros of both signs are equal otherwise."""
    if isinstance(value, float):
        return struct.pack("d", value)
    return struct.pack("dd", value.real, value.imag) if isinstance(value, complex) else value


def beside(value: Any) -> dict[str, Any]:
    """The attributes that a plain value, a container or a function of a class of its own has beside what it is or holds."""
    kind = type(value)
    if not kind.__dictoffset__ or isinstance(value, enum.Enum) or not isinstance(value, _BESIDE):
        return {}
    return own_attributes(value) or {}


def cell_value(cell: types.CellType) -> Any:
    """The variable that a closure's cell holds; ``ABSENT`` where it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def class_attribute(kind: type, name: str) -> Any:
    """What a class or one of its bases has under the name, as it stands there."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), ABSENT)


def own_attributes(value: Any) -> dict[str, Any] | None:
    """The dictionary of an object's own attributes, past what its class makes of reading it."""
    try:
        own = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return None
    return own if isinstance(own, dict) else None


def reachable(roots: Iterable[Any], enter: Callable[[Any], bool]) -> Iterator[Any]:
    """What is in ``roots``, and in whatever ``enter`` says to look into; each object once, plain values left out."""
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
    """What a function has in variables of the code around it, and as defaults."""
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    return *map(cell_value, function.__closure__ or ()), *defaults


def functions_in(roots: Iterable[Any], enter: Callable[[Any], bool]) -> list[types.FunctionType]:
    """Functions in ``roots``, in whatever ``enter`` says to look into, and in what these functions close over."""
    found: dict[int, types.FunctionType] = {}
    waiting: list[Iterable[Any]] = [roots]
    while waiting:
        for one in reachable(waiting.pop(), enter):
            if isinstance(one, types.FunctionType) and id(one) not in found:
                found[id(one)] = one
                waiting.append(closed_over(one))
    return [*found.values()]


def parts_of(value: Any) -> Iterator[Any]:
    """What is in nested containers, and no plain value."""
    return reachable([value], lambda one: isinstance(one, CONTAINERS))


def items(container: Any) -> list[Any]:
    """What is in it; of a dict, keys and values."""
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*iter(container)]


def refill(container: Any, others: Any) -> None:
    """Put ``others`` instead of what is in it."""
    container.clear()
    (container.update if isinstance(container, (dict, set)) else container.extend)(others)


def is_open(value: Any) -> bool:
    """Whether it is an object with attributes of its own, such as a configuration, that may be looked into."""
    if isinstance(value, (*PLAIN, *CONTAINERS, *CLOSED)) or getattr(type(value), "_lowtide_runtime", False):
        return False  # a planned forward that a wrapper keeps is none of the model's state
    return bool(fields(value))


def fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots included, past what its class makes of reading them: a configuration may
    refuse to answer."""
    own = getattr(value, "__dict__", None)
    return {**(own if type(own) is dict else {}), **in_slots(value)}


def in_slots(value: Any) -> dict[str, Any]:
    """What an object has in slots, by name, past what its class makes of reading it."""
    found = {}
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                # Python stores a hidden one under a name of the class's.
                hidden = name.startswith("__") and not name.endswith("__")
                name = f"_{base.__name__.lstrip('_')}{name}" if hidden else name
                with contextlib.suppress(AttributeError):
                    found[name] = object.__getattribute__(value, name)
    return found
