"""Numbers that a forward pass only compares with others: a draw of Python's generator, or the number of a step.

While the pass is traced a ``StandIn`` stands for the number, and what it is compared with is noted, also after sums and
products with other numbers. Another number makes the same program where all of these ``Comparisons`` have the same answers. A
pass may count the number on, too, which planned calls then do. Where it does anything else with it, comes to it by another way
or in the backward pass, or asks for classes with ``type``, which no stand-in can answer, it is traced again, with the number
itself.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lowtide.capture.python_state.code.code_names import asks_for_types
from lowtide.capture.python_state.guards.counters import assign
from lowtide.capture.python_state.guards.reads import Read
from lowtide.capture.python_state.paths import AttributePath
from lowtide.objects.walk import current

NUMBERS = (int, float)


class _Operation(NamedTuple):
    """An operator between a number and another one, the latter on the left where ``reflected``."""

    function: Callable[[Any, Any], Any]
    other: Any
    reflected: bool = False

    def __call__(self, value: Any) -> Any:
        return self.function(self.other, value) if self.reflected else self.function(value, self.other)


@dataclass(slots=True, eq=False)
class Comparisons:
    """How a number of type ``kind`` was compared: the operations it went through, the last of which compares, and the answers.
    ``counting``: the operations that made it the number that the pass left in its place."""

    kind: type
    answers: list[tuple[tuple[_Operation, ...], bool]] = field(default_factory=list)
    counting: tuple[_Operation, ...] = ()
    used_otherwise: bool = False
    _stand_ins: list[weakref.ref[StandIn]] = field(default_factory=list)

    @classmethod
    def equal_to(cls, value: Any) -> Comparisons:
        """As if it had been compared with its own value."""
        return cls(type(value), [((_Operation(operator.eq, value),), True)])

    def hold(self, value: Any) -> bool:
        """Whether another number in its place compares as it did."""
        if type(value) is not self.kind:
            return False
        try:
            return all(_result(operations, value) == answer for operations, answer in self.answers)
        except (ArithmeticError, TypeError):  # where eager comes to another answer first, or raises it
            return False

    def turns(self, read: Read, calls: int) -> bool:
        """Whether the number compares otherwise within so many ``calls``, each of which adds as much as the last one did to the
        value that was read before."""
        now = current(*read[:3])
        if type(now) is not self.kind or type(read.value) is not self.kind:
            return False
        return not all(self.hold(now + call * (now - read.value)) for call in range(calls + 1))

    def stand_in(self, value: Any, operations: tuple[_Operation, ...] = ()) -> StandIn:
        """For ``value``, which the number has become by these operations."""
        made = StandIn(value, self, operations)
        self._stand_ins.append(weakref.ref(made))
        return made

    def count(self, left: StandIn) -> bool:
        """The pass has left this one in the number's place: whether that is another number."""
        self.used_otherwise = self.used_otherwise or left._comparisons is not self or type(left._value) is not self.kind
        self.counting = left._operations
        return bool(self.counting)

    def ended(self) -> None:
        """The pass is over: what has kept a stand-in, its result say, does more with it than to compare it."""
        self.used_otherwise = self.used_otherwise or any(one() is not None for one in self._stand_ins)
        self._stand_ins.clear()


def _result(operations: Iterable[_Operation], value: Any) -> Any:
    return functools.reduce(lambda number, operation: operation(number), operations, value)


class StandIn:
    """Stands for a number while it is only compared with numbers. Its class says that it is one."""

    __slots__ = ("__weakref__", "_comparisons", "_operations", "_value")

    def __init__(self, value: Any, comparisons: Comparisons, operations: tuple[_Operation, ...]) -> None:
        self._value, self._comparisons, self._operations = value, comparisons, operations

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._value)

    def _after(self, operation: _Operation) -> tuple[Any, tuple[_Operation, ...]]:
        if type(operation.other) not in (*NUMBERS, bool):
            raise self._misused()
        return operation(self._value), (*self._operations, operation)

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        answer, operations = self._after(_Operation(compare, other))
        self._comparisons.answers.append((operations, answer))
        return bool(answer)

    def _computed(self, function: Callable[[Any, Any], Any], reflected: bool, other: Any) -> StandIn:
        value, operations = self._after(_Operation(function, other, reflected))
        if type(value) not in NUMBERS:
            raise self._misused()
        return self._comparisons.stand_in(value, operations)

    def _misused(self, *_: Any) -> TypeError:
        self._comparisons.used_otherwise = True
        return TypeError("the number was not only compared")

    def _refused(self, *_: Any) -> Any:
        raise self._misused()

    __getattr__ = __repr__ = _refused

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)

    def __neg__(self) -> StandIn:
        return self._computed(operator.mul, False, -1)


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
    *("pos", "abs", "invert"),
    *(f"{side}{name}" for name in ("and", "or", "xor", "lshift", "rshift", "divmod") for side in ("", "r")),
):
    setattr(StandIn, f"__{_name}__", StandIn._refused)


class ComparedNumber(NamedTuple):
    """A number that was read, and how it compares."""

    read: Read
    comparisons: Comparisons

    @staticmethod
    def of(read: Read) -> ComparedNumber:
        return ComparedNumber(read, Comparisons(type(current(*read[:3]))))


class CountedNumber(NamedTuple):
    """An attribute of the model that a pass counts on, and by which operations."""

    place: AttributePath
    operations: tuple[_Operation, ...]

    def change(self, value: Any) -> tuple[str, Any]:
        """What the pass does where it finds ``value``, see ``attribute_effects``."""
        return "set", _result(self.operations, value)


@dataclass(frozen=True, slots=True)
class Standing:
    """Stand-ins in their places. ``counted``: by the ids of their owners and their names, those that were counted on. ``bare``:
    where a run comes to the numbers themselves, by the ids of owners and then the names."""

    counted: set[tuple[int, str]] = field(default_factory=set)
    bare: dict[int, dict[str, Comparisons]] = field(default_factory=dict)

    def was_read(self, owner: Any, name: str | None) -> None:
        """The run has read this attribute of ``owner``, or all of them."""
        for own, comparisons in self.bare.get(id(owner), {}).items():
            comparisons.used_otherwise = comparisons.used_otherwise or name in (own, None)

    def met(self, function: types.FunctionType) -> None:
        """The run may call it, which may tell stand-ins from numbers."""
        if self.bare and asks_for_types(function.__code__):
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
        owner = copy_of.get(id(read.owner))
        value = None if owner is None else current(read.kind, owner, read.name)
        known = comparisons.kind in NUMBERS and type(value) is comparisons.kind and value == current(*read[:3])
        if owner is read.owner or not known:
            comparisons.used_otherwise = True  # nothing to be sure of
        else:
            assign(read.kind, owner, read.name, comparisons.stand_in(value))
            put.append((read.kind, owner, read.name, value, comparisons))
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
        for *_, comparisons in put:
            comparisons.ended()
