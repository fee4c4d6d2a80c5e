# ruff: noqa: E501
"""Values that are equal, and yet tell themselves apart, take each other's place between two steps: the next one is as in eager."""

from __future__ import annotations

import array
import decimal
import functools
import math
import struct
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.fuzz.changed import Computes, Reader, Thing, follows, rows


class Same:
    """Equal to everything."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Integer(int):
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Items(list):  # type: ignore[type-arg]
    pass


class Hidden:
    __slots__ = ("__number",)

    def __init__(self, number: float) -> None:
        self.__number = number

    def get(self) -> float:
        return self.__number


_NUMBER = 1.0


def scored(y: torch.Tensor) -> torch.Tensor:
    return y * _NUMBER


def _with(value: Any, number: float) -> Any:
    value.number = number
    return value


def _sign(number: float) -> float:
    return 2.0 + math.copysign(1.0, number)


def _is_bool(value: Any) -> float:
    return 1.0 + isinstance(value, bool)


def _pair(factor: float) -> type:
    class Pair(NamedTuple):
        first: float

        def scaled(self) -> float:
            return self.first * factor

    return Pair


def _function(number: float) -> Any:
    def function(y: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return y * by * function.number  # type: ignore[attr-defined, no-any-return]

    return _with(function, number)


def _elsewhere(number: float) -> Any:
    """The same code with other global variables."""

    def function(y: torch.Tensor, by: float = 1.0) -> torch.Tensor:
        return y * by * _NUMBER

    return types.FunctionType(function.__code__, {"_NUMBER": number}, "function", (1.0,))


_NEGATIVE_NAN = struct.unpack("d", struct.pack("Q", 0xFFF8000000000000))[0]

# name: what a state holds, another value, and what is read of it.
HELD: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "sign of an imaginary zero": (complex(1, 0.0), complex(1, -0.0), lambda v: _sign(v.imag)),
    "sign of a NaN": (math.nan, _NEGATIVE_NAN, _sign),
    "attribute of an integer of its own class": (_with(Integer(2), 1.0), _with(Integer(2), 2.0), lambda v: v.number),
    "a bool in a tuple": ([(1, 2)], [(True, 2)], lambda v: _is_bool(v[0][0])),
    "a float in a tuple": ([(1, 2)], [(1.0, 2)], lambda v: 1.0 + isinstance(v[0][0], float)),
    "sign of a zero in a tuple": ([(0.0, 2)], [(-0.0, 2)], lambda v: _sign(v[0][0])),
    "a bool in a tuple in a tuple": ([((1,), 2)], [((True,), 2)], lambda v: _is_bool(v[0][0][0])),
    "an equal object in a tuple": ([(Same(1.0),)], [(Same(2.0),)], lambda v: v[0][0].number),
    "a bool in a key": ({(1, 2): 1.0}, {(True, 2): 1.0}, lambda v: _is_bool(next(iter(v))[0])),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_a_state_holds(name: str) -> None:
    one, other, read = HELD[name]
    if isinstance(one, list | dict):  # the same container with another item

        def change(state: Any) -> None:
            items = state.value
            items.clear()
            (items.update if isinstance(items, dict) else items.extend)(other)
    else:

        def change(state: Any) -> None:
            state.value = other

    follows(Reader(Thing(value=one), lambda s: read(s.value)), lambda model: change(model.state))


def test_arguments_of_an_exception_that_stays() -> None:
    held = Thing(error=ValueError(1.0))
    follows(Reader(held, lambda s: s.error.args[0]), lambda model: setattr(model.state.error, "args", (2.0,)))


# name: an argument, another one, and what is computed with it.
GIVEN: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[torch.Tensor, Any], Any]]] = {
    "sign of zero": (lambda: 0.0, lambda: -0.0, lambda y, v: y * _sign(v)),
    "sign of an imaginary zero": (lambda: 0j, lambda: complex(0, -0.0), lambda y, v: y * _sign(v.imag)),
    "sign of a zero in a frozenset": (lambda: frozenset({0.0}), lambda: frozenset({-0.0}), lambda y, v: y * _sign(next(iter(v)))),
    "digits of a decimal number": (lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.00"), lambda y, v: y * len(str(v))),
    "a bool as a key in an object": (lambda: Thing(d={1: 2}), lambda: Thing(d={True: 2}), lambda y, v: y * _is_bool(next(iter(v.d)))),
    "a bool in a set": (lambda: {1}, lambda: {True}, lambda y, v: y * _is_bool(next(iter(v)))),
    "order of a set": (lambda: {0, 8}, lambda: {8, 0}, lambda y, v: y * (1 + next(iter(v)))),
    "attribute of a dictionary": (lambda: _with(Table(), 1.0), lambda: _with(Table(), 2.0), lambda y, v: y * v.number),
    "attribute of a list": (lambda: _with(Items(), 1.0), lambda: _with(Items(), 2.0), lambda y, v: y * v.number),
    "attribute of an integer": (lambda: _with(Integer(1), 1.0), lambda: _with(Integer(1), 2.0), lambda y, v: y * v.number),
    "attribute of a partial": (lambda: _with(functools.partial(int), 1.0), lambda: _with(functools.partial(int), 2.0), lambda y, v: y * v.number),
    "attribute of a function": (lambda: _function(1.0), lambda: _function(2.0), lambda y, v: v(y)),
    "global variables of a function": (lambda: _elsewhere(1.0), lambda: _elsewhere(2.0), lambda y, v: v(y)),
    "type of an array's items": (lambda: array.array("d", [1.0]), lambda: array.array("q", [4607182418800017408]), lambda y, v: y * (1 + (v.typecode == "q"))),
    "class of a named tuple": (lambda: _pair(1.0)(1.0), lambda: _pair(2.0)(1.0), lambda y, v: y * v.scaled()),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_what_an_argument_is(name: str) -> None:
    one, other, compute = GIVEN[name]
    follows(Computes(lambda s, y, x, v: compute(y, v)), lambda model: (rows(), other()), (rows(), one()))


def test_a_slot_with_a_hidden_name_of_an_argument() -> None:
    held = Hidden(1.0)
    change = functools.partial(setattr, held, "_Hidden__number", 2.0)
    follows(Computes(lambda s, y, x, v: y * v.get()), lambda model: change(), (rows(), held))
