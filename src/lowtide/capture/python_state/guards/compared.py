"""Numbers that a forward pass compares with others, or hands to operators: a draw of Python's generator, the number of a step,
the weight of a term that is annealed.

While the pass is traced a ``StandIn`` stands for the number, and what it is compared with is noted, also after sums and
products with other numbers. Another number makes the same program where all of these ``Comparisons`` have the same answers. A
pass may count the number on, too, which planned calls then do. It may hand it to operators that take one
(``capture.taken_numbers``), which makes it an input of the program (``program.scalars``). Where it does anything else with it,
comes to it by another way, or asks for classes with ``type``, which no stand-in can answer, it is traced again, with the number
itself.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lowtide.capture.python_state.guards import by_numpy
from lowtide.capture.python_state.guards.reads import Read
from lowtide.capture.python_state.guards.shown import at_least, at_most, close_to, place_among, places_told_apart
from lowtide.capture.python_state.guards.texts import text_stand_in
from lowtide.objects import structure
from lowtide.objects.places import current
from lowtide.program.items import Item
from lowtide.program.scalars import (
    CHANGING,
    NUMBERS,
    Operation,
    Operations,
    Source,
    Taken,
    can_be_input,
    plain_kind,
    result_of,
)


@dataclass(slots=True, eq=False)
class Comparisons:
    """How a number of type ``kind``, at a ``place`` among others, was compared: the operations it went through, the last of
    which compares, and the answers. ``counting``: the operations that made it the number that the pass left in its place.
    ``number``: among those that may be inputs of the program, if it may; ``moved``: operators are given another; ``taken``:
    what they took, of all of these. ``join``: what becomes of it and another one. ``tensor``: which the pass has computed and
    has read it of, if it has: nobody knows its value before; ``convert``: told of code that converts it. ``kept``: whether
    something still has it when the pass is over, as a result or, where it has failed, an error may."""

    kind: type
    place: int = 0
    answers: list[tuple[Operations, Any]] = field(default_factory=list)
    counting: Operations = ()
    used_otherwise: bool = False
    kept: bool = False
    number: Any = None
    moved: bool = False
    taken: list[Taken] = field(default_factory=list)
    join: Callable[[Callable[..., Any], StandIn, Any], Any] | None = None
    tensor: torch.Tensor | None = None
    convert: Callable[[types.FrameType], None] = lambda _: None
    _stand_ins: list[weakref.ref[Any]] = field(default_factory=list)

    @classmethod
    def equal_to(cls, value: Any) -> Comparisons:
        """As if it had been compared with its own value."""
        return cls(type(value), answers=[((Operation(operator.eq, value),), True)])

    def hold(self, value: Any) -> bool:
        """Whether another number in its place compares as it did."""
        if type(value) is not self.kind or not (self.number is None or can_be_input(value)):
            return False
        try:
            return all(result_of(operations, value) == answer for operations, answer in self.answers)
        except (ArithmeticError, TypeError):  # where eager comes to another answer first, or raises it
            return False

    @property
    def decides(self) -> bool:
        """Whether another number may make another program."""
        return any(operations[-1] != _AMONG_NONE for operations, _ in self.answers)

    def turns(self, read: Read, calls: int) -> bool:
        """Whether the number compares otherwise within so many ``calls``, each of which adds as much as the last one did to the
        value that was read before."""
        now = current(*read[:3])
        if type(now) is not self.kind or type(read.value) is not self.kind:
            return False
        return not all(self.hold(now + call * (now - read.value)) for call in range(calls + 1))

    @property
    def begin(self) -> Operations:
        """What makes the number of one of Python's."""
        return (Operation(self.kind),) if self.kind in CHANGING and self.kind not in NUMBERS else ()

    def stand_in(self, value: Any, operations: Operations = ()) -> Any:
        """For ``value``, which the number has become by these operations."""
        kind = StandIn if self.kind in CHANGING else text_stand_in(self.place)
        made = kind(value, self, operations or self.begin)
        self._stand_ins.append(weakref.ref(made))
        return made

    def lies_among(self, special: tuple[float, ...], one: StandIn) -> None:
        """An operator takes what it has become, of which no ``special`` number, and none beyond one, makes another."""
        if self.tensor is not None:
            if special:
                raise one.misused()
            return
        where = Operation(place_among, special)
        answer = (*one.operations, where), where(one.value)
        self.answers += [answer] if answer not in self.answers else []

    def take(self, value: Any, operations: Operations) -> Any:
        """An operator takes ``value``, which the number has become by these operations: what it is given. Where ``moved``, that
        is a number close to it, as nothing else that operators take is, so that what comes of it is known by its value."""
        assert self.number is not None
        source = Source(self.number, operations)
        known = next((one for one in self.taken if one.source == source and not one.placed), None)
        if known is None:
            shown = close_to(value, len(self.taken)) if self.moved else value
            known = Taken(source, value, shown)
            self.taken.append(known)
        return known.shown

    def take_at(self, ends: Sequence[tuple[int, Operations]], last: int) -> list[int] | None:
        """The same where an operator takes it, and what is so far behind it, as places in a tensor, the first of which may be
        from 0 to ``last``: what it is given, ``None`` where nothing would tell these from other numbers."""
        begin = ends[0][0] if self.tensor is None else 0  # nobody knows where, so that any place does
        values = [begin + value - ends[0][0] for value, _ in ends]
        if last == 0:
            return values
        sources = [Source(self.number, operations) for _, operations in ends]
        made = places_told_apart(sources, values, last, self.taken, self.moved)
        self.taken += [] if made is None else [one for one in made if one not in self.taken]
        return None if made is None else [one.shown for one in made]

    def count(self, left: StandIn) -> bool:
        """The pass has left this one in the number's place: whether that is another number."""
        self.used_otherwise = self.used_otherwise or left.comparisons is not self or type(left.value) is not self.kind
        self.counting = left.operations[len(self.begin) :]
        return bool(self.counting)

    def ended(self) -> None:
        """The pass is over: what has kept a stand-in, its result say, does more with it than what is known."""
        self.kept = any(one() is not None for one in self._stand_ins)
        self._stand_ins.clear()


_FEW = range(1, 17)  # programs that a counter's remainders may make


class StandIn(torch.SymFloat):
    """Stands for a number while it is compared with numbers or handed to operators. Its class says that it is one; PyTorch's
    functions take it for a symbolic one, of which they let their modes know."""

    def __init__(self, value: Any, comparisons: Comparisons, operations: Operations) -> None:
        self.value, self.comparisons, self.operations = value, comparisons, operations

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @property
    def kind(self) -> type:
        return type(self.value)

    def taken(self, special: tuple[float, ...]) -> Any:
        """An operator takes it, of which no ``special`` number, and none beyond one, makes another: what it is given."""
        if self.comparisons.number is None:
            raise self.misused()
        self.comparisons.lies_among(special, self)
        operations, value = self.operations, self.value
        if self.kind not in NUMBERS:  # as PyTorch takes it
            plain = plain_kind(self.kind)
            operations, value = (*operations, Operation(plain)), plain(value)
        shown = self.comparisons.take(value, operations)
        if self.comparisons.moved and repr(shown) == repr(value):
            raise self.misused()
        return shown

    def _after(self, operation: Operation) -> tuple[Any, Operations]:
        if type(operation.other) not in (*CHANGING, bool):
            raise self.misused()
        return operation(self.value), (*self.operations, operation)

    def compared(self, compare: Callable[[Any, Any], bool], other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if type(other) is StandIn or self.comparisons.tensor is not None:
            return self._joined(compare, other)
        answer, operations = self._after(Operation(compare, other))
        self.comparisons.answers.append((operations, answer))
        return bool(answer)

    def computed(self, function: Callable[[Any, Any], Any], reflected: bool, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if type(other) is StandIn:
            return self._joined(function, other)
        return self._made(*self._after(Operation(function, other, reflected)))

    def _joined(self, function: Callable[..., Any], other: Any) -> Any:
        every = [one.comparisons for one in (self, other) if type(one) is StandIn]
        join = next((one.join for one in every if one.tensor is not None), self.comparisons.join)
        if join is None or any(one.join is None for one in every):
            for one in every:
                one.used_otherwise = True
            raise self.misused()
        return join(function, self, other)

    def is_at_least(self, bound: int) -> bool:
        return bool(self.compared(at_least, bound))

    def is_within(self, last: int) -> bool:
        """Whether it is a place from 0 to the ``last``."""
        return self.is_at_least(0) and bool(self.compared(at_most, last))

    def asked(self, predicate: Callable[[Any], bool]) -> bool:
        """What a predicate says of this number alone."""
        if self.comparisons.tensor is not None:
            return bool(self._joined(predicate, None))
        answer = predicate(self.value)
        self.comparisons.answers.append(((*self.operations, Operation(predicate)), answer))
        return answer

    def through(self, function: Callable[[Any], Any]) -> StandIn:
        """What a function of this number alone makes."""
        operation = Operation(function)
        return self._made(operation(self.value), (*self.operations, operation))

    def _made(self, value: Any, operations: Operations) -> StandIn:
        if type(value) not in CHANGING:
            raise self.misused()
        made: StandIn = self.comparisons.stand_in(value, operations)
        return made

    def misused(self, *_: Any) -> TypeError:
        """More is done with it than is known."""
        self.comparisons.used_otherwise = True
        return TypeError("the number was not only compared")

    def _refused(self, *_: Any) -> Any:
        raise self.misused()

    def _converted(self) -> Any:
        self.comparisons.convert(sys._getframe(1))
        raise self.misused()

    def __array_ufunc__(self, function: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return by_numpy.called(self, function, method, inputs, options)

    def __array_function__(self, function: Any, kinds: Any, args: Any, options: Any) -> Any:
        """NumPy bounds it: by two of the functions above."""
        if function is not np.clip or len(args) != 3 or options:
            raise self.misused()
        return np.minimum(np.maximum(args[0], args[1]), args[2])

    def __index__(self) -> int:
        """The number itself, for the programs in which it is that, where a remainder lets it be one of few."""
        few = (operation.function is operator.mod and operation.other in _FEW for operation in self.operations)
        if self.kind is not int or self.comparisons.tensor is not None or not any(few):
            raise self.misused()
        self.compared(operator.eq, self.value)
        return int(self.value)

    def __hash__(self) -> int:
        return hash(self.__index__())

    def __repr__(self) -> str:
        return repr(self.__index__())

    __float__ = __int__ = _converted
    __getattr__ = conjugate = hex = is_integer = as_integer_ratio = _sympy_ = _refused
    node = property(_refused)  # what reads it as a number of Python's would
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return bool(self.compared(operator.ne, 0))

    def __neg__(self) -> StandIn:
        return self.through(operator.neg)

    def __abs__(self) -> StandIn:
        return self.through(abs)

    def __round__(self, digits: int | None = None) -> StandIn:
        return self._made(*self._after(Operation(round, digits))) if type(digits) is int else self.through(round)


def kind_of(number: Any) -> type:
    """Of a number, or of what stands in for one."""
    return number.kind if type(number) is StandIn else type(number)


def _derived(one: StandIn) -> tuple[torch.Tensor, Item] | None:
    tensor = one.comparisons.tensor
    return None if tensor is None else (tensor, Item(one.operations))


structure.DERIVED[StandIn] = _derived


class LateStandIn(StandIn):
    """Stands for one that a run has read in the forward pass already: whoever does anything with it misuses it."""

    def _after(self, operation: Operation) -> tuple[Any, Operations]:
        raise self.misused()

    def through(self, function: Callable[[Any], Any]) -> StandIn:
        raise self.misused()


for _compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(StandIn, f"__{_compare.__name__}__", functools.partialmethod(StandIn.compared, _compare))
for _function in (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
):
    for _side in ("", "r"):
        _method = functools.partialmethod(StandIn.computed, _function, bool(_side))
        setattr(StandIn, f"__{_side}{_function.__name__}__", _method)
for _name in (
    *("complex", "format", "reduce_ex"),
    *("pos", "invert"),
    *(f"{side}{name}" for name in ("and", "or", "xor", "lshift", "rshift", "divmod") for side in ("", "r")),
):
    setattr(StandIn, f"__{_name}__", StandIn._refused)


for _rounding in (math.floor, math.ceil, math.trunc):
    setattr(StandIn, f"__{_rounding.__name__}__", functools.partialmethod(StandIn.through, _rounding))


_AMONG_NONE = Operation(place_among, ())
