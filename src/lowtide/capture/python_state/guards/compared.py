"""Numbers that a forward pass only compares or passes to operators, such as a draw from Python's generator, a step count, or
an annealed loss weight.

During the trace a ``StandIn`` replaces the number and records its comparisons, also those after arithmetic with other numbers.
Another number yields the same program if all these ``Comparisons`` have the same answers. The pass may also update the number
(count on), which planned calls then do too, or pass it to operators that accept one (``capture.taken_numbers``), which makes it
an input of the program (``program.scalars``). If the pass does anything else with it, reaches it by another way, or asks for
classes with ``type``, which no stand-in can answer, it is traced again with the number itself.
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
    """How a number of type ``kind``, the ``place``-th of a trace, was compared: sequences of operations, the last of which
    compares, and their ``answers``. ``counting``: the operations that produced the number that the pass left in its place.
    ``number``: its index among possible inputs of the program, or ``None``. ``moved``: operators are given a different number.
    ``taken``: what operators took, shared by all numbers. ``join``: computes a function of two numbers. ``tensor``: the tensor
    of the program that the number was read from, if any; its value is unknown before the call. ``convert``: called for code
    that converts the number. ``kept``: something (a result, or after a failure an error) holds a stand-in after the pass."""

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
        """Comparisons of a number that must stay equal to ``value``."""
        return cls(type(value), answers=[((Operation(operator.eq, value),), True)])

    def hold(self, value: Any) -> bool:
        """Whether ``value`` in the number's place gives the same answers."""
        if type(value) is not self.kind or not (self.number is None or can_be_input(value)):
            return False
        try:
            return all(result_of(operations, value) == answer for operations, answer in self.answers)
        except (ArithmeticError, TypeError):  # eager gets another answer before, or raises the same error
            return False

    @property
    def decides(self) -> bool:
        """Whether another number may lead to another program."""
        return any(operations[-1] != _AMONG_NONE for operations, _ in self.answers)

    def turns(self, read: Read, calls: int) -> bool:
        """Whether the number will compare differently within the next ``calls``, assuming that each adds the difference between
        the current value and the one in ``read``."""
        now = current(*read[:3])
        if type(now) is not self.kind or type(read.value) is not self.kind:
            return False
        return not all(self.hold(now + call * (now - read.value)) for call in range(calls + 1))

    @property
    def begin(self) -> Operations:
        """The initial conversion of a plain Python number to ``kind``, for kinds other than Python's own."""
        return (Operation(self.kind),) if self.kind in CHANGING and self.kind not in NUMBERS else ()

    def stand_in(self, value: Any, operations: Operations = ()) -> Any:
        """Make a stand-in for ``value``, the result of applying ``operations`` to the number."""
        kind = StandIn if self.kind in CHANGING else text_stand_in(self.place)
        made = kind(value, self, operations or self.begin)
        self._stand_ins.append(weakref.ref(made))
        return made

    def lies_among(self, special: tuple[float, ...], one: StandIn) -> None:
        """Record that an operator takes ``one``: its position among the operator's ``special`` numbers must stay the same."""
        if self.tensor is not None:
            if special:
                raise one.misused()
            return
        where = Operation(place_among, special)
        answer = (*one.operations, where), where(one.value)
        self.answers += [answer] if answer not in self.answers else []

    def take(self, value: Any, operations: Operations) -> Any:
        """Record that an operator takes ``value``, the result of ``operations``, and return what to pass to it. If ``moved``,
        that is a nearby number unlike any other taken one, so that values derived from it can be recognized."""
        assert self.number is not None
        source = Source(self.number, operations)
        known = next((one for one in self.taken if one.source == source and not one.placed), None)
        if known is None:
            shown = close_to(value, len(self.taken)) if self.moved else value
            known = Taken(source, value, shown)
            self.taken.append(known)
        return known.shown

    def take_at(self, ends: Sequence[tuple[int, Operations]], last: int) -> list[int] | None:
        """Record that an operator takes ``ends`` (the number and others at fixed distances from it) as positions in a tensor,
        the first one between 0 and ``last``. Returns what to pass to it, or ``None`` if the positions could not be
        recognized."""
        begin = ends[0][0] if self.tensor is None else 0  # its value is unknown: any position does
        values = [begin + value - ends[0][0] for value, _ in ends]
        if last == 0:
            return values
        sources = [Source(self.number, operations) for _, operations in ends]
        made = places_told_apart(sources, values, last, self.taken, self.moved)
        self.taken += [] if made is None else [one for one in made if one not in self.taken]
        return None if made is None else [one.shown for one in made]

    def count(self, left: StandIn) -> bool:
        """Record the stand-in that the pass ``left`` in the number's place. Returns whether the number was updated."""
        self.used_otherwise = self.used_otherwise or left.comparisons is not self or type(left.value) is not self.kind
        self.counting = left.operations[len(self.begin) :]
        return bool(self.counting)

    def ended(self) -> None:
        """The pass is over: note whether anything (such as its result) has kept a stand-in, whose further use is unknown."""
        self.kept = any(one() is not None for one in self._stand_ins)
        self._stand_ins.clear()


_FEW = range(1, 17)  # moduli of a counter for which one program per remainder is acceptable


class StandIn(torch.SymFloat):
    """Replaces a number during a trace and records comparisons and arithmetic. ``__class__`` reports the number's type. As a
    ``SymFloat`` it is accepted by PyTorch's functions, which pass it on to the active modes."""

    def __init__(self, value: Any, comparisons: Comparisons, operations: Operations) -> None:
        self.value, self.comparisons, self.operations = value, comparisons, operations

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.value)

    @property
    def kind(self) -> type:
        return type(self.value)

    def taken(self, special: tuple[float, ...]) -> Any:
        """Record that an operator takes this number, and return what to pass to it. ``special``: numbers that the operator
        treats differently; another number must lie between the same ones."""
        if self.comparisons.number is None:
            raise self.misused()
        self.comparisons.lies_among(special, self)
        operations, value = self.operations, self.value
        if self.kind not in NUMBERS:  # convert to the plain kind that PyTorch accepts
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
        """Whether the number is a position from 0 to ``last``."""
        return self.is_at_least(0) and bool(self.compared(at_most, last))

    def asked(self, predicate: Callable[[Any], bool]) -> bool:
        """The answer of a predicate of this number alone; recorded."""
        if self.comparisons.tensor is not None:
            return bool(self._joined(predicate, None))
        answer = predicate(self.value)
        self.comparisons.answers.append(((*self.operations, Operation(predicate)), answer))
        return answer

    def through(self, function: Callable[[Any], Any]) -> StandIn:
        """The stand-in for a function of this number alone."""
        operation = Operation(function)
        return self._made(operation(self.value), (*self.operations, operation))

    def _made(self, value: Any, operations: Operations) -> StandIn:
        if type(value) not in CHANGING:
            raise self.misused()
        made: StandIn = self.comparisons.stand_in(value, operations)
        return made

    def misused(self, *_: Any) -> TypeError:
        """Note that the number is used in a way that is not recorded; returns the error to raise."""
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
        """Support ``np.clip``, as ``np.minimum`` of ``np.maximum``."""
        if function is not np.clip or len(args) != 3 or options:
            raise self.misused()
        return np.minimum(np.maximum(args[0], args[1]), args[2])

    def __index__(self) -> int:
        """The number as a plain integer, if a remainder limits it to few values; the program then requires this value."""
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
    node = property(_refused)  # read by PyTorch code that treats it as a real ``SymFloat``
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
    """The type of a number, or of the number that a stand-in replaces."""
    return number.kind if type(number) is StandIn else type(number)


def _derived(one: StandIn) -> tuple[torch.Tensor, Item] | None:
    tensor = one.comparisons.tensor
    return None if tensor is None else (tensor, Item(one.operations))


structure.DERIVED[StandIn] = _derived


class LateStandIn(StandIn):
    """A stand-in placed after the forward pass: any use of it, in the backward pass, counts as misuse."""

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
