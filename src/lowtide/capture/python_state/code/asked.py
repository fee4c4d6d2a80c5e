"""What code asks its process for, if no variable holds the answer. Guards ask again before each planned call."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._tensor_str import PRINT_OPTS

from lowtide.capture.python_state.code import process
from lowtide.capture.python_state.code.installed import is_standard
from lowtide.memory.collector import thresholds
from lowtide.objects.walk import PLAIN, items

# Questions by the names in code that ask them.
_ENVIRONMENT = {"environ", "environb", "getenv", "expandvars", "expanduser", "home"}
_ASKED: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("getcwd", "cwd", "abspath", "resolve"), os.getcwd),
    **dict.fromkeys(("backends", "allow_tf32", "get_fastpath_enabled", "fill_uninitialized_memory"), process.backends),
    **dict.fromkeys(("is_initialized", "get_rank", "get_world_size", "get_backend"), process.ranks),
    **dict.fromkeys(("is_autocast_enabled", "get_autocast_dtype"), process.autocast),
    **dict.fromkeys(("decimal", "Decimal", "getcontext"), process.decimals),
    **dict.fromkeys(("getLogger", "isEnabledFor", "getEffectiveLevel"), process.loggers),
    **dict.fromkeys(("warn", "warn_explicit"), process.errors),
    **dict.fromkeys(("locale", "localeconv", "localtime", "mktime", "fromtimestamp", "astimezone"), process.culture),
    "getLevelName": lambda: str((logging._nameToLevel, logging._levelToName)),
    "sched_getaffinity": lambda: str(os.sched_getaffinity(0)),
    "FloatingPointError": lambda: str(np.geterr()),
    "current_thread": process.thread,
    "filters": lambda: str(warnings.filters),
    "get_threshold": lambda: str(thresholds()),
    "is_multithreading_enabled": lambda: str(torch.autograd.is_multithreading_enabled()),
    "initial_seed": lambda: str(torch.initial_seed()),
    "PRINT_OPTS": lambda: str(PRINT_OPTS),
}
# Questions by the modules and names of functions, for names that alone say nothing.
_FUNCTIONS: dict[str, Callable[[], Any]] = dict.fromkeys(
    ("threading.active_count", "threading.activeCount", "threading.enumerate"), process.threads
)
_SEARCHING = {"find_spec", "import_module", "__import__"}  # these search the folders of ``sys.path``
_ASKING = re.compile(r"_?(get|is|are|has)")  # names of functions that only ask
_MOVING = re.compile("count|stat|alloc|memory|load|object|frame")  # answers that differ in every call


class Named(NamedTuple):
    """A variable: its ``owner`` (a namespace, cell or function), its ``name``, and a ``text`` for messages."""

    kind: str
    owner: Any
    name: str
    text: str


def asked_under(names: Collection[str]) -> Iterator[Named]:
    """What code asks for that contains these names."""
    if not _ENVIRONMENT.isdisjoint(names):
        yield Named("item", vars(os.environ), "_data", "os.environ")
    if not _SEARCHING.isdisjoint(names):
        for name in ("path", "meta_path"):
            yield Named("item", vars(sys), name, f"sys.{name}")
    if "argv" in names:
        yield Named("item", vars(sys), "argv", "sys.argv")
    for name in sorted(_ASKED.keys() & names):
        yield Named("answer", _ASKED[name], "", f"the answer of {name}()")


def asked_by(function: Any) -> Iterator[Named]:
    """What a library's function asks for, by whatever name it was reached, and the seed of a PyTorch generator."""
    if isinstance(function, torch.Generator):
        yield Named("answer", function.initial_seed, "", "the seed of a generator")
        return
    name = str(getattr(function, "__name__", ""))
    answer = _FUNCTIONS.get(f"{getattr(function, '__module__', '')}.{name}")
    if answer is None and name not in _ASKED:
        yield from asked_under({name, *names_behind(function)})
        answer = _answer_of(function)
    if answer is not None:
        yield Named("answer", answer, "", f"the answer of {name}()")
    elif name in _ASKED:
        yield from asked_under({name})


@functools.lru_cache(maxsize=1 << 12)
def names_behind(function: Any) -> frozenset[str]:
    """The names in a function of Python's own, and in the functions of its module that it calls."""
    found, waiting = set[str](), [function]
    while waiting:
        one = waiting.pop()
        if (
            isinstance(one, types.FunctionType)
            and is_standard(one.__module__)
            and one.__module__ == function.__module__
        ):
            names = set(one.__code__.co_names) - found
            found |= names
            waiting += [one.__globals__[name] for name in names & one.__globals__.keys()]
    return frozenset(found)


@functools.lru_cache(maxsize=1 << 12)
def _answer_of(function: Any) -> Callable[[], str] | None:
    """The answer of a function of Python's, NumPy's or PyTorch's that takes no arguments and only asks, as a text."""
    name, module = function.__name__, str(function.__module__).partition(".")[0]
    asks = _ASKING.match(name) and not _MOVING.search(name)
    if not asks or not (module in sys.stdlib_module_names or module in ("numpy", "torch")):
        return None
    try:
        return functools.partial(_text, function) if not _takes(function) and _is_plain(function()) else None
    except Exception:  # noqa: BLE001  # which has no answer here, or takes something
        return None


def _takes(function: Any) -> bool:
    """Whether the function takes arguments, if its signature is known."""
    try:
        return bool(inspect.signature(function).parameters)
    except ValueError:
        return not isinstance(function, types.BuiltinFunctionType)


def _text(function: Callable[[], Any]) -> str:
    return repr(function())


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, items(value))) if isinstance(value, (tuple, list, dict)) else isinstance(value, PLAIN)
