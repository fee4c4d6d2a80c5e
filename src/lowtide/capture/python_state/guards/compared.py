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

import bisect
import contextlib
import functools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from lowtide.capture.python_state.code.code_names import asks_for_types
from lowtide.capture.python_state.guards.counters import assign
from lowtide.capture.python_state.guards.reads import Read
from lowtide.capture.python_state.paths import AttributePath
from lowtide.objects.walk import current
from lowtide.program.scalars import NUMBERS, Operation, Operations, Source, Taken, can_be_input, result_of


@dataclass(slots=True, eq=False)
class Comparisons:
    """How a number of type ``kind`` was compared: the operations it went through, the last of which compares, and the answers.
    ``counting``: the operations that made it the number that the pass left in its place. ``number``: among those that may be
    inputs of the program, if it may; ``moved``: operators are given another; ``taken``: what they took, of all of these.
    ``kept``: whether something still has it when the pass is over, as a result or, where it has failed, an error may."""

    kind: type
    answers: list[tuple[Operations, Any]] = field(default_factory=list)
    counting: Operations = ()
    used_otherwise: bool = False
    kept: bool = False
    number: int | None = None
    moved: bool = False
    taken: list[Taken] = field(default_factory=list)
    _stand_ins: list[weakref.ref[StandIn]] = field(default_factory=list)

    @classmethod
    def equal_to(cls, value: Any) -> Comparisons:
        """As if it had been compared with its own value."""
        return cls(type(value), [((Operation(operator.eq, value),), True)])

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

    def stand_in(self, value: Any, operations: Operations = (), shown: Any = None) -> StandIn:
        """For ``value``, which the number has become by these operations; ``shown``: what operators are given for it."""
        made = StandIn(value, self, operations, self._another(value) if shown is None else shown)
        self._stand_ins.append(weakref.ref(made))
        return made

    def _another(self, value: Any) -> Any:
        """What operators are given: where ``moved``, a number close to this one, as no other is that may be an input, so that
        what comes of it is known by its value."""
        if not self.moved or self.number is None:
            return value
        place = self.number if self.number >= 0 else 1000 - self.number
        if isinstance(value, int):
            return value + 1_000_003 + 1_009 * place
        return value * (1 - 7.31e-7 - 1.13e-9 * place) if value else 3.17e-7 + 1.13e-9 * place

    def count(self, left: StandIn) -> bool:
        """The pass has left this one in the number's place: whether that is another number."""
        self.used_otherwise = self.used_otherwise or left._comparisons is not self or type(left._value) is not self.kind
        self.counting = left._operations
        return bool(self.counting)

    def ended(self) -> None:
        """The pass is over: what has kept a stand-in, its result say, does more with it than what is known."""
        self.kept = any(one() is not None for one in self._stand_ins)
        self._stand_ins.clear()


class StandIn(torch.SymFloat):
    """Stands for a number while it is compared with numbers or handed to operators. Its class says that it is one; PyTorch's
    functions take it for a symbolic one, of which they let their modes know."""

    def __init__(self, value: Any, comparisons: Comparisons, operations: Operations, shown: Any) -> None:
        self._value, self._comparisons, self._operations, self._shown = value, comparisons, operations, shown

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    @property
    def kind(self) -> type:
        return type(self._value)

    def taken(self, special: tuple[float, ...]) -> Any:
        """An operator takes it, of which no ``special`` number, and none beyond one, makes another: what it is given."""
        comparisons = self._comparisons
        if comparisons.number is None or (comparisons.moved and self._shown == self._value):
            raise self._misused()
        where = Operation(_place_among, special)
        answer = (*self._operations, where), where(self._value)
        one = Taken(Source(comparisons.number, self._operations), self._value, self._shown)
        comparisons.answers += [answer] if answer not in comparisons.answers else []
        comparisons.taken.append(one)
        return self._shown

    def _after(self, operation: Operation) -> tuple[Any, Operations]:
        if type(operation.other) not in (*NUMBERS, bool):
            raise self._misused()
        return operation(self._value), (*self._operations, operation)

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        answer, operations = self._after(Operation(compare, other))
        self._comparisons.answers.append((operations, answer))
        return bool(answer)

    def _computed(self, function: Callable[[Any, Any], Any], reflected: bool, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        return self._made(*self._after(Operation(function, other, reflected)))

    def through(self, function: Callable[[Any], Any]) -> StandIn:
        """What a function of this number alone makes."""
        operation = Operation(function)
        return self._made(operation(self._value), (*self._operations, operation))

    def _made(self, value: Any, operations: Operations) -> StandIn:
        if type(value) not in NUMBERS:
            raise self._misused()
        return self._comparisons.stand_in(value, operations, operations[-1](self._shown))

    def _misused(self, *_: Any) -> TypeError:
        self._comparisons.used_otherwise = True
        return TypeError("the number was not only compared")

    def _refused(self, *_: Any) -> Any:
        raise self._misused()

    __getattr__ = __repr__ = conjugate = hex = is_integer = as_integer_ratio = _sympy_ = _refused
    node = property(_refused)  # what reads it as a number of Python's would
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __bool__(self) -> bool:
        return bool(self._compared(operator.ne, 0))

    def __neg__(self) -> StandIn:
        return self.through(operator.neg)

    def __abs__(self) -> StandIn:
        return self.through(abs)


for _compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    setattr(StandIn, f"__{_compare.__name__}__", functools.partialmethod(StandIn._compared, _compare))
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
        _method = functools.partialmethod(StandIn._computed, _function, bool(_side))
        setattr(StandIn, f"__{_side}{_function.__name__}__", _method)
for _name in (
    *("float", "int", "complex", "index", "hash", "floor", "ceil", "trunc", "round", "format", "reduce_ex"),
    *("pos", "invert"),
    *(f"{side}{name}" for name in ("and", "or", "xor", "lshift", "rshift", "divmod") for side in ("", "r")),
):
    setattr(StandIn, f"__{_name}__", StandIn._refused)


def _place_among(value: Any, special: tuple[float, ...]) -> tuple[int, int, bool]:
    """Where a number lies among others, which are in order, and whether it is finite."""
    return bisect.bisect_left(special, value), bisect.bisect_right(special, value), math.isfinite(value)


_AMONG_NONE = Operation(_place_among, ())


class ComparedNumber(NamedTuple):
    """A number that was read, and how it compares."""

    read: Read
    comparisons: Comparisons

    @staticmethod
    def of(read: Read, number: int | None, moved: bool, taken: list[Taken]) -> ComparedNumber:
        """As of ``Comparisons``."""
        value = current(*read[:3])
        number = number if can_be_input(value) else None
        return ComparedNumber(read, Comparisons(type(value), number=number, moved=moved, taken=taken))


class CountedNumber(NamedTuple):
    """An attribute of the model that a pass counts on, and by which operations."""

    place: AttributePath
    operations: Operations

    def change(self, value: Any) -> tuple[str, Any]:
        """What the pass does where it finds ``value``, see ``attribute_effects``."""
        return "set", result_of(self.operations, value)


@dataclass(frozen=True, slots=True)
class Standing:
    """Stand-ins in their places. ``counted``: by the ids of their owners and their names, those that were counted on. ``bare``:
    where a run comes to the numbers themselves, by the ids of owners and then the names. ``every``: of all."""

    counted: set[tuple[int, str]] = field(default_factory=set)
    bare: dict[int, dict[str, Comparisons]] = field(default_factory=dict)
    every: list[Comparisons] = field(default_factory=list)

    def was_read(self, owner: Any, name: str | None) -> None:
        """The run has read this attribute of ``owner``, or all of them."""
        for own, comparisons in self.bare.get(id(owner), {}).items():
            comparisons.used_otherwise = comparisons.used_otherwise or name in (own, None)

    def ended(self) -> None:
        """The run is over, with its backward pass."""
        for comparisons in self.every:
            comparisons.ended()

    def met(self, function: types.FunctionType) -> None:
        """The run may call it, which may tell stand-ins from numbers; NumPy's functions ask them for more first."""
        if self.bare and not str(function.__module__).startswith("numpy.") and asks_for_types(function.__code__):
            for names in self.bare.values():
                for comparisons in names.values():
                    comparisons.used_otherwise = True


@contextlib.contextmanager
def standing_in(numbers: Iterable[ComparedNumber], copies: Mapping[int, tuple[Any, Any]]) -> Iterator[Standing]:
    """Inside, stand-ins are where the numbers were read, in the copies of their owners; the numbers are in the originals, and
    afterwards in the copies again. ``copies``: the original and the copy, by the id of the latter."""
    copy_of = {id(original): copied for original, copied in copies.values()}
    standing = Standing()
    put = []
    for read, comparisons in numbers:
        if read.kind == "argument":  # it is given to the run
            standing.every.append(comparisons)
            continue
        owner = copy_of.get(id(read.owner))
        value = None if owner is None else current(read.kind, owner, read.name)
        known = comparisons.kind in NUMBERS and type(value) is comparisons.kind and value == current(*read[:3])
        if owner is read.owner or not known:
            comparisons.used_otherwise = True  # nothing to be sure of
        else:
            assign(read.kind, owner, read.name, comparisons.stand_in(value))
            put.append((read.kind, owner, read.name, value, comparisons))
            standing.every.append(comparisons)
            standing.bare.setdefault(id(read.owner), {})[read.name] = comparisons
    try:
        yield standing
    finally:
        for kind, owner, name, value, comparisons in put:
            left = current(kind, owner, name)
            if type(left) is StandIn:
                standing.counted.update({(id(owner), name)} if comparisons.count(left) else ())
                assign(kind, owner, name, value)
            del left
            standing.bare.setdefault(id(owner), {})[name] = comparisons
