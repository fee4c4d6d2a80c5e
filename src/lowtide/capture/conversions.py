"""``float(x)`` and ``int(x)`` of computed tensors, and of numbers that differ from call to call.

Both need a Python number, which is unknown while the model is traced, and no object can stand for the result. So the
next trace gives the variables of a module whose code converts numbers their own ``float`` and ``int``: classes that
stand for Python's, but leave numbers of tensors (``read_numbers``) and stand-ins as they are.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import types
from collections.abc import Iterator
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lowtide.capture.clocks import clocks_followed
from lowtide.capture.parsed import followed_by_functions
from lowtide.capture.python_state.code.beside import Code, code_of
from lowtide.capture.python_state.code.code_names import codes, functions_of, is_trusted_module
from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.capture.read_numbers import ReadingNumbers, TensorNumbers, Variables
from lowtide.capture.trace.patches import STANDS_FOR, InPlace
from lowtide.objects.walk import ABSENT

CONVERSIONS = (torch.Tensor.__float__, torch.Tensor.__int__)
_KINDS = (float, int)
_NAMES = frozenset(kind.__name__ for kind in _KINDS)


class _Converting(InPlace):
    """Makes a class stand for ``float`` or ``int`` in this thread, also as a key of a dictionary."""

    numbers: TensorNumbers
    thread: int

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and cls.thread == get_ident():
            number = cls.numbers.item(args[0]) if isinstance(args[0], torch.Tensor) else args[0]
            if type(number) is StandIn:
                return number if number.kind is cls.original else number.through(cls.original)
        return cls.original(*args, **kwargs)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.original

    def __hash__(cls) -> int:
        return hash(cls.original)


def can_follow(variables: Variables) -> bool:
    """Whether the code of a module does not notice the replacement: it is not PyTorch's, has no variables ``float`` or
    ``int`` of its own, and does not ask what these are."""
    if is_trusted_module(str(variables.get("__name__"))) or not _NAMES.isdisjoint(variables):
        return False
    own = [one for one in variables.values() if getattr(one, "__module__", None) == variables.get("__name__")]
    members = [member for kind in own if isinstance(kind, type) for member in functions_of(kind)]
    functions = [one for one in (*own, *members) if isinstance(one, types.FunctionType)]
    return not any(_tells_apart(function.__code__) for function in functions)


@functools.lru_cache(maxsize=1 << 14)
def _tells_apart(code: types.CodeType) -> bool:
    """Whether code may ask whether something is ``float`` itself."""
    for part in codes(code):
        instructions = [*dis.get_instructions(part)]
        loads = any(
            one.argval in _NAMES and "NULL" not in one.argrepr for one in instructions if one.opname == "LOAD_GLOBAL"
        )
        if loads and any(one.opname == "IS_OP" for one in instructions):
            return True
    return False


@contextlib.contextmanager
def followed(code: Code, numbers: TensorNumbers) -> Iterator[None]:
    """A context in which functions in the model's ``code`` take stand-ins, clocks return stand-ins, and conversions
    leave numbers of tensors as they are."""
    names = {"numbers": numbers, "thread": get_ident(), STANDS_FOR: ABSENT}
    stands = {kind.__name__: _Converting(kind.__name__, (), {**names, "original": kind}) for kind in _KINDS}
    for variables in numbers.converting:
        variables.update(stands)
    try:
        with followed_by_functions(code), clocks_followed(code, numbers):
            yield
    finally:
        for variables in numbers.converting:
            for name in stands:
                variables.pop(name, None)


@contextlib.contextmanager
def numbers_read(model: nn.Module, like: TensorNumbers) -> Iterator[None]:
    """A context in which a model that runs on fake tensors without being traced reads numbers from them as in a
    trace."""
    reading = _Reading(TensorNumbers(True, [], False, like.converting, like.clocks))
    with followed(code_of(model), reading.numbers), reading:
        yield


class _Reading(ReadingNumbers):
    def called(self, func: Any, args: Any, kwargs: Any, calling: types.FrameType) -> Any:
        number = self.numbers.item(args[0]) if func is torch.Tensor.item else None
        return func(*args, **kwargs) if number is None else number
