"""Numbers among operators' arguments that differ from call to call: what Python code computes from a number that
changes between calls (an annealed weight, say).

In ``Call``, such an argument is an ordinary number: its value in the captured call, which also knows how it follows
from the changing number. If a program has any, a call passes the changing numbers after its flat inputs, each as a
tensor of one element.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from lowtide.program.program import Call, Program, TensorMeta

NUMBERS = (int, float)  # types that operators take
# Types that may change. Operators treat NumPy's numbers as Python's.
CHANGING = (*NUMBERS, np.float64, np.float32, np.int64)
_WHOLE = (int, np.integer)


class Operation(NamedTuple):
    """An operator between a number and another one (on the left if ``reflected``), or a function of the number
    alone."""

    function: Callable[..., Any]
    other: Any = None
    reflected: bool = False

    def __call__(self, value: Any) -> Any:
        if self.other is None:
            return self.function(value)
        return self.function(self.other, value) if self.reflected else self.function(value, self.other)


Operations = tuple[Operation, ...]


def result_of(operations: Iterable[Operation], value: Any) -> Any:
    """Apply the operations to a number, one after the other."""
    return functools.reduce(lambda number, operation: operation(number), operations, value)


class Source(NamedTuple):
    """How a scalar follows from a call's changing number ``number``, or from a number of a tensor
    (``program.items``)."""

    number: Any
    operations: Operations


class FloatScalar(float):
    """A changing number that is a float."""

    source: Source

    def __repr__(self) -> str:  # independent of the value in this call
        return repr(self.source)


class IntScalar(int):
    """A changing number that is an integer."""

    source: Source

    def __repr__(self) -> str:
        return repr(self.source)


SCALARS = (FloatScalar, IntScalar)
_KINDS: dict[type, type] = {float: FloatScalar, int: IntScalar}


class Taken(NamedTuple):
    """Records that an operator took the number that ``source`` describes: its ``value`` in the call, and the value
    ``shown`` while tracing. ``placed``: as a position in a tensor."""

    source: Source
    value: Any
    shown: Any
    placed: bool = False


def can_be_input(number: Any) -> bool:
    """Whether a tensor can carry the number: integers must fit into 64 bits."""
    return not isinstance(number, _WHOLE) or abs(int(number)) < 1 << 63


def plain_kind(kind: type) -> type:
    """The type that operators see for a number of this type."""
    return int if issubclass(kind, _WHOLE) else float


def as_tensor(number: Any) -> torch.Tensor:
    """Wrap a changing number in a tensor, as a call passes it."""
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, _WHOLE) else torch.float64, device="cpu")


def with_scalars(shown: Program, plain: Program, taken: Sequence[Taken]) -> Program | None:
    """``plain`` with scalars wherever ``shown``, the same call traced with other numbers, has another number that
    follows from one that was ``taken``. ``None`` if the two differ otherwise."""
    calls = _matched(shown, plain, lambda one, other: _call(one, other, taken))
    if calls is None:
        return None
    found = replace(plain, calls=calls)
    return found if found.same_as(replace(shown, calls=calls, metas=_placed_alike(shown, plain)), frozenset()) else None


def _placed_alike(shown: Program, plain: Program) -> tuple[TensorMeta, ...]:
    """The layouts of ``shown``, without the positions at which values begin in memory, which may depend on numbers."""
    pairs = zip(shown.metas, plain.metas, strict=False)
    return tuple(replace(one, storage_offset=other.storage_offset) for one, other in pairs)


def with_scalars_of(like: Program, program: Program, numbers: Sequence[Any]) -> Program | None:
    """``program`` with the scalars of ``like``, another program of the same operators. ``numbers``: the changing
    numbers with which ``program`` was traced. ``None`` if it has others in their places."""
    calls = _matched(like, program, lambda old, call: _like(old, call, numbers))
    return None if calls is None else replace(program, calls=calls)


def _matched(one: Program, other: Program, match: Callable[[Call, Call], Call]) -> tuple[Call, ...] | None:
    """The calls that ``match`` makes from each pair of calls of the two programs; ``None`` if a pair does not match."""
    if len(one.calls) != len(other.calls):
        return None
    try:
        return tuple(map(match, one.calls, other.calls))
    except _UnexplainedError:
        return None


def _like(old: Call, call: Call, numbers: Sequence[Any]) -> Call:
    args, kwargs = _taken_over((old.args, old.kwargs), (call.args, call.kwargs), numbers)
    return replace(call, args=args, kwargs=kwargs)


def _taken_over(old: Any, argument: Any, numbers: Sequence[Any]) -> Any:
    if isinstance(old, SCALARS):
        made = result_of(old.source.operations, numbers[old.source.number])
        if type(argument) is not type(made) or repr(argument) != repr(made):
            raise _UnexplainedError
        return _scalar(argument, old.source)
    if _is_sequence(argument) and type(old) is type(argument) and len(old) == len(argument):
        return type(argument)(_taken_over(one, other, numbers) for one, other in zip(old, argument, strict=True))
    if isinstance(argument, dict) and isinstance(old, dict):
        return {name: _taken_over(old.get(name), value, numbers) for name, value in argument.items()}
    return argument


def _is_sequence(argument: Any) -> bool:
    """Whether the argument is a list or tuple; torch.fx has its own classes of these."""
    return isinstance(argument, (tuple, list)) and not hasattr(argument, "_fields")


class _UnexplainedError(Exception):
    """Raised if two traces differ in a way that no changing number explains."""


def _call(shown: Call, plain: Call, taken: Sequence[Taken]) -> Call:
    if (shown.target, shown.positions) != (plain.target, plain.positions):
        raise _UnexplainedError
    args, kwargs = _argument((shown.args, shown.kwargs), (plain.args, plain.kwargs), taken)
    return Call(plain.target, args, kwargs, plain.positions)


def _argument(shown: Any, plain: Any, taken: Sequence[Taken]) -> Any:
    if type(shown) is not type(plain):
        raise _UnexplainedError
    if _is_sequence(plain) or isinstance(plain, dict):
        if len(shown) != len(plain):
            raise _UnexplainedError
        if isinstance(plain, dict):
            return {key: _argument(shown.get(key), value, taken) for key, value in plain.items()}
        return type(plain)(_argument(one, other, taken) for one, other in zip(shown, plain, strict=True))
    if type(plain) not in NUMBERS or repr(shown) == repr(plain):
        return plain  # everything else is compared with the rest of the program
    source = next(_explaining(taken, shown, plain), None)
    if source is None:
        raise _UnexplainedError
    return _scalar(plain, source)


def _explaining(taken: Sequence[Taken], shown: Any, plain: Any) -> Iterator[Source]:
    """The sources from which both numbers may follow; unchanged numbers first."""
    yield from (one.source for one in taken if repr((one.shown, one.value)) == repr((shown, plain)))
    others = (one for one in taken if not one.placed)
    yield from (found for one in others for found in _sources(one, shown) if _is(found, one, shown, plain))


def _scalar(number: Any, source: Source) -> Any:
    made = _KINDS[type(number)](number)
    made.source = source
    return made


def _is(source: Source, one: Taken, shown: Any, plain: Any) -> bool:
    """Whether the operations of ``source``, applied to what was taken, give both numbers."""
    more = source.operations[len(one.source.operations) :]
    try:
        made = result_of(more, one.value), result_of(more, one.shown)
    except (ArithmeticError, ValueError):
        return False
    return repr(made) == repr((plain, shown))


def _sources(one: Taken, shown: Any) -> Iterator[Source]:
    """How a number may follow from one that an operator took: unchanged, or as operators compute others from it (the
    share that dropout keeps, the exponent of a derivative, the logarithm of a base)."""
    for more in (*_DERIVED, *_by_whole_numbers(one.shown, shown)):
        yield Source(one.source.number, (*one.source.operations, *more))


_REST = Operation(operator.sub, 1, reflected=True)
_INVERSE = Operation(operator.truediv, 1, reflected=True)
_DERIVED: tuple[Operations, ...] = (
    (),
    (_REST,),
    (Operation(operator.sub, 1),),
    (Operation(operator.mul, -1),),
    (_INVERSE,),
    (_REST, _INVERSE),
    (Operation(math.log),),
)


def _by_whole_numbers(taken: Any, shown: Any) -> Iterator[Operations]:
    """The number divided by a number of classes, or multiplied by one."""
    for function, ratio in ((operator.truediv, (taken, shown)), (operator.mul, (shown, taken))):
        try:
            number = round(ratio[0] / ratio[1])
        except (ArithmeticError, ValueError):
            continue
        yield (Operation(function, number),)
