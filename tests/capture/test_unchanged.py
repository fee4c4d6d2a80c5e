"""The comparisons by identity in the compiled core, beside the same in Python."""

from __future__ import annotations

import itertools
import operator
import random
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lowtide.native import core


class _Thing:
    shared = 1


class _Refuses(dict[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise RuntimeError(key)


def _rows(draw: random.Random, count: int) -> tuple[list[Any], list[str]]:
    values = [object(), 1, "x", None, _Thing]
    kinds: list[Callable[[dict[str, Any]], Any]] = [dict, dict, OrderedDict, MappingProxyType]
    mappings = [
        draw.choice(kinds)({f"k{i}": draw.choice(values) for i in range(draw.randrange(4))}) for _ in range(count)
    ]
    return mappings, [f"k{draw.randrange(4)}" for _ in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_items_as_python_finds_them(seed: int) -> None:
    draw = random.Random(seed)
    mappings, keys = _rows(draw, draw.randrange(1, 5))
    there = [key in one for one, key in zip(mappings, keys, strict=True)]
    assert core.have_no_items(tuple(mappings), tuple(keys)) == (not any(there))
    items = [one.get(key, None) if draw.random() < 0.9 else object() for one, key in zip(mappings, keys, strict=True)]
    same = all(known and one[key] is item for known, one, key, item in zip(there, mappings, keys, items, strict=True))
    assert core.have_items(tuple(mappings), tuple(keys), tuple(items)) == same
    plain = [one for one in mappings if isinstance(one, dict)]
    assert core.are_empty(tuple(plain)) == (not any(plain))


@pytest.mark.parametrize("seed", range(20))
def test_values_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    plain = [dict(one) for one in _rows(draw, draw.randrange(4))[0]]
    values = [*itertools.chain.from_iterable(map(dict.values, plain))]
    assert core.have_values(tuple(plain), tuple(values))
    assert not core.have_values(tuple(plain), (*values, None))
    if values:
        assert not core.have_values(tuple(plain), tuple(values[:-1]))
        assert not core.have_values(tuple(plain), (*values[:-1], object()))
        moved = [*values[1:], values[0]]
        assert core.have_values(tuple(plain), tuple(moved)) == all(map(operator.is_, values, moved))


def test_classes_and_dictionaries_of_attributes() -> None:
    things, module = [_Thing(), _Thing()], nn.Linear(2, 2)
    objects = (*things, module, 3)
    assert core.are_of_types(objects, (_Thing, _Thing, nn.Linear, int))
    assert not core.are_of_types(objects, (_Thing, nn.Linear, nn.Linear, int))
    assert core.have_dictionaries((*things, module), tuple(map(vars, (*things, module))))
    assert not core.have_dictionaries(tuple(things), (vars(things[0]), vars(things[0])))
    assert not core.have_dictionaries((3,), ({},))
    things[0].__dict__ = dict(vars(things[0]))
    kept = vars(things[0])
    things[0].__dict__ = {}
    assert not core.have_dictionaries((things[0],), (kept,))


def test_attributes_are_told_apart() -> None:
    value = object()
    things = SimpleNamespace(value=value), SimpleNamespace(value=value)
    assert core.have_attributes(things, ("value", "value"), (value, value))
    assert not core.have_attributes(things, ("value", "__dict__"), (value, value))
    assert not core.have_attributes(things, ("value", "other"), (value, None))
    function = test_attributes_are_told_apart
    assert core.have_attributes((function, function), ("__code__", "__defaults__"), (function.__code__, None))
    things[1].value = object()
    assert not core.have_attributes(things, ("value", "value"), (value, value))


def test_errors_are_a_no() -> None:
    """And are not left for the next call of Python's to find."""
    refusing = MappingProxyType(_Refuses(a=1))
    assert not core.have_items((refusing,), ("a",), (1,))
    assert not core.have_items(({},), ("a",), (None,))
    assert not core.are_empty((3,))  # type: ignore[arg-type]
    assert not core.have_no_items((3,), ("a",))  # type: ignore[arg-type]
    assert core.have_items((), (), ())
