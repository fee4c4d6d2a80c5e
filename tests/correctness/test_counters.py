"""A forward pass that counts, outside of the model or in what it holds: refused by name where the program depends on it."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import io
import itertools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from tests.fuzz.changed import Computes, Reversed, rows

_number = 0
_iterator = itertools.count(1)
_totals = {"calls": 0, "other": 3}
_unread = 0
_unread_totals = {"calls": 0}
_queue = collections.deque([0])
_bytes = bytearray(1)
_local = threading.local()
_variable: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
_space = types.SimpleNamespace(calls=0)


class _Class:
    calls = 0

    def __init__(self) -> None:
        self.number = 0

    def counted(self) -> int:
        self.number += 1
        return self.number

    def __call__(self) -> int:
        return self.counted()


_object = _Class()


def _of_variable() -> int:
    global _number
    _number += 1
    return _number


def _of_totals() -> int:
    _totals["calls"] += 1
    return _totals["calls"]


def _of_queue() -> int:
    _queue[0] += 1
    return _queue[0]


def _of_bytes() -> int:
    _bytes[0] += 1
    return _bytes[0]


def _of_class() -> int:
    _Class.calls += 1
    return _Class.calls


def _of_function() -> int:
    _of_function.calls += 1  # type: ignore[attr-defined]
    return _of_function.calls  # type: ignore[attr-defined,no-any-return]


def _of_default(calls: list[int] = [0]) -> int:  # noqa: B006
    calls[0] += 1
    return calls[0]


def _of_thread() -> int:
    _local.calls += 1
    return _local.calls


def _of_context() -> int:
    _variable.set(_variable.get() + 1)
    return _variable.get()


def _of_space() -> int:
    _space.calls += 1
    return _space.calls


def _closure() -> tuple[Callable[[], int], Callable[[], int]]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count, lambda: number


_count, _counted = _closure()
OUTSIDE: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "global variable": (lambda: _of_variable(), lambda: _number, "_number"),
    "global iterator": (lambda: next(_iterator), lambda: next(_iterator), "_iterator"),
    "dictionary": (lambda: _of_totals(), lambda: dict(_totals), "_totals"),
    "queue": (lambda: _of_queue(), lambda: list(_queue), "_queue"),
    "bytes": (lambda: _of_bytes(), lambda: bytes(_bytes), "_bytes"),
    "class attribute": (lambda: _of_class(), lambda: _Class.calls, "_Class.calls"),
    "object": (lambda: _object(), lambda: _object.number, "_object.number"),
    "function attribute": (lambda: _of_function(), lambda: vars(_of_function)["calls"], "_of_function.calls"),
    "default argument": (lambda: _of_default(), lambda: _of_default.__defaults__, "_of_default.__defaults__"),
    "thread": (lambda: _of_thread(), lambda: _local.calls, "_local"),
    "context variable": (lambda: _of_context(), lambda: _variable.get(), "_variable"),
    "namespace": (lambda: _of_space(), lambda: _space.calls, "_space"),
    "closure": (lambda: _count(), lambda: _counted(), "number in .*_closure"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _from_zero() -> Iterator[None]:
    global _number
    _number = _Class.calls = _of_function.calls = _local.calls = _object.number = 0  # type: ignore[attr-defined]
    _variable.set(0)
    yield


@pytest.mark.parametrize("case", OUTSIDE)
def test_counters_outside_of_the_model(case: str) -> None:
    """Named, and as they were before the capture."""
    count, read, name = OUTSIDE[case]
    before = repr(read())
    model = Computes(lambda s, y, x: y * count())
    with pytest.raises(lowtide.CaptureError, match=rf"changes outside of the model \(.*{name}"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert repr(read()) == ("2" if case == "global iterator" else before)


@pytest.mark.parametrize("what", ["a tensor", "the result"])
def test_counters_that_show_in_no_operator(what: str) -> None:
    model: nn.Module = _Returned(_of_variable)
    if what == "a tensor":
        model = Computes(lambda s, y, x: y * torch.tensor(_of_variable()))
    with pytest.raises(lowtide.CaptureError, match=r"outside of the model \(.*_number"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert _number == 0


class _Returned(nn.Module):
    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), count

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.linear(x).sum(), self.count()


def test_counters_that_nothing_depends_on() -> None:
    """They are left alone by the capture; a cache that the first call fills stays."""
    cache: dict[str, float] = {}
    lengths: list[int] = []

    def compute(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        global _unread
        _unread += 1
        _unread_totals["calls"] += 1
        lengths.append(len(x))
        return y * cache.setdefault("scale", 2.0)

    lowtide.rematerialize(Computes(compute), (rows(),), budget="100%", planner="keep-all")
    assert (_unread, _unread_totals, lengths) == (0, {"calls": 0}, []) and cache == {"scale": 2.0}


def _at_sixth(self: Any, y: torch.Tensor, count: Any) -> torch.Tensor:
    return y * 2 if count > 5 else y


def _global_late(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _of_variable()
    return _at_sixth(self, y, _number)


def _dictionary_late(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _at_sixth(self, y, _of_totals())


def _object_late(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    _object.counted()
    return _at_sixth(self, y, getattr(_object, "num" + "ber"))


def _asked_for_its_class(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held += 1
    return _at_sixth(self, y, self.held) if type(self.held) is int else y


def _as_text(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held += 1
    return _at_sixth(self, y, len(f"{self.held:x<{self.held}}"))


def _in_hook(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held += 1
    y = y.clone()
    y.register_hook(lambda gradient: _at_sixth(self, gradient, self.held))
    return y


def _as_length(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held.append(1)
    return _at_sixth(self, y, len(self.held))


def _joined(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held = (*self.held, 1)
    return _at_sixth(self, y, len(self.held))


def _next(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _at_sixth(self, y, next(self.held))


def _beside_a_tensor(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held["calls"] = self.held.get("calls", 0) + 1
    self.held["mean"] = x.mean(0)
    return _at_sixth(self, y + self.held["mean"], self.held["calls"])


def _beside_a_tensor_in_a_tuple(self: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    self.held = (self.held[0] + 1 if self.held else 1, x.mean(0))
    return _at_sixth(self, y + self.held[1], self.held[0])


LATE: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Any]]] = {
    "global variable": (_global_late, int),
    "dictionary": (_dictionary_late, int),
    "object": (_object_late, int),
    "asked for its class": (_asked_for_its_class, int),
    "as text": (_as_text, int),
    "in a hook": (_in_hook, int),
    "length of a list": (_as_length, list),
    "length of a tuple": (_joined, tuple),
    "iterator": (_next, itertools.count),
    "beside a tensor": (_beside_a_tensor, dict),
    "beside a tensor in a tuple": (_beside_a_tensor_in_a_tuple, tuple),
}


def _eight_steps(model: nn.Module, linear: nn.Linear) -> list[Any]:
    """The losses, and the gradients of a layer."""
    steps = []
    for step in range(8):
        model.zero_grad()
        loss = model(rows() + step)
        loss.backward()
        assert linear.weight.grad is not None
        steps.append((loss.item(), linear.weight.grad.tolist()))
    return steps


@pytest.mark.parametrize("case", LATE)
def test_counters_that_matter_in_a_later_call(case: str) -> None:
    """No three calls in a row show that the sixth is another program: what reads the counter is not planned."""
    compute, make = LATE[case]
    found = []
    for planned in (False, True):
        _totals["calls"] = _object.number = 0
        globals().update(_number=0)
        torch.manual_seed(0)
        model = nn.Sequential(Computes(compute, lambda module: setattr(module, "held", make())))
        model.append(nn.Identity())
        if planned:
            with pytest.raises(lowtide.CaptureError, match="forward pass changes"):
                lowtide.rematerialize(model, (rows(),), budget="100%", on_capture_error="error")
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        found.append(_eight_steps(model, model[0].linear))
    assert found[0] == found[1]


def test_a_hook_that_counts() -> None:
    calls = [0]

    def hook(module: nn.Module, args: Any, output: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
        calls[0] += 1
        return output * calls[0]

    model = Computes(lambda s, y, x: y)
    model.linear.register_forward_hook(hook)
    with pytest.raises(lowtide.CaptureError, match=r"outside of the model \(.*hook"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert calls == [0]


def _generated() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _closing(generator: Iterator[int]) -> Callable[[], int]:
    return lambda: next(generator)


def test_a_generator_in_a_closure() -> None:
    model = Computes(lambda s, y, x: y * s.count(), lambda s: setattr(s, "count", _closing(_generated())))
    with pytest.raises(lowtide.CaptureError, match=r"generators \(generator in"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")


class _Slotted:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> int:
        self.number += 1
        return self.number


class _Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def forward(self) -> int:
        self.number += 1
        return self.number


def _counted_in(held: Any) -> int:
    held[0] += 1
    number: int = held[0]
    return number


def _written(stream: io.BytesIO) -> int:
    stream.write(b"a")
    return len(stream.getvalue())


INSIDE: dict[str, Callable[[], Callable[[], int]]] = {
    "itertools.count": lambda: functools.partial(next, itertools.count(1)),
    "itertools.cycle": lambda: functools.partial(next, itertools.cycle([1, 2])),
    "zip": lambda: functools.partial(lambda held: next(held)[0], zip([1, 2, 3, 4], [5, 6, 7, 8], strict=True)),
    "list": lambda: functools.partial(next, iter([1, 2, 3, 4, 5])),
    "bound method": lambda: _Class().counted,
    "object": _Class,
    "object with slots": _Slotted,
    "partial function": lambda: functools.partial(_counted_in, [0]),
    "bytearray": lambda: functools.partial(_counted_in, bytearray(1)),
    "array": lambda: functools.partial(_counted_in, array.array("l", [0])),
    "stream": lambda: functools.partial(_written, io.BytesIO()),
    "key": lambda: functools.partial(lambda held: next(iter(held))(), {_Class(): 1}),
    "hidden module": lambda: functools.partial(lambda held: held[0](), [_Hidden()]),
}  # fmt: skip


COUNTED = ("object", "object with slots", "key")


def _steps(compute: Callable[..., torch.Tensor], prepare: Callable[[Any], None]) -> tuple[list[Any], list[Any], Any]:
    """What eight steps compute in eager and planned, and the planned model."""
    found = []
    for planned in (False, True):
        torch.manual_seed(0)
        model: Any = Computes(compute, prepare)
        if planned:
            lowtide.rematerialize(model, budget="100%", planner="keep-all")
        found.append(_eight_steps(model, model.linear))
    return found[0], found[1], model


@pytest.mark.parametrize("case", COUNTED)
def test_counters_in_attributes_of_the_model(case: str) -> None:
    """They are numbers that planned calls count on."""
    plain, planned, model = _steps(lambda s, y, x: y * s.count(), lambda s: setattr(s, "count", INSIDE[case]()))
    assert plain == planned
    assert model.forward.parts is None and not model.forward.is_online and len(lowtide.plans(model)) == 1


@pytest.mark.parametrize("case", [case for case in INSIDE if case not in COUNTED])
def test_counters_in_the_model(case: str) -> None:
    model = Computes(lambda s, y, x: y * s.count(), lambda s: setattr(s, "count", INSIDE[case]()))
    with pytest.raises(lowtide.CaptureError, match=r"attributes that its own forward pass changes \(count|outside"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert model.count() == 1


class _CountingHook:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return output * self.calls


def test_an_object_that_is_a_hook_and_counts() -> None:
    model, hook = Computes(lambda s, y, x: y), _CountingHook()
    model.linear.register_forward_hook(hook)
    with pytest.raises(lowtide.CaptureError, match="forward pass changes"):
        lowtide.rematerialize(model, (rows(),), budget="100%", planner="keep-all", on_capture_error="error")
    assert hook.calls == 0


def _hooked(module: Any, y: torch.Tensor) -> torch.Tensor:
    share = module.calls
    y.register_hook(lambda gradient: gradient * share)
    return y * 2


BACKWARD: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "function": lambda module, y: Reversed.apply(y, module.calls / 10),  # type: ignore[no-untyped-call]
    "hook": _hooked,
}


@pytest.mark.parametrize("case", BACKWARD)
def test_counters_that_show_in_the_backward_pass(case: str) -> None:
    """A schedule that scales gradients: of reversed ones, say."""

    def forward(module: Any, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        module.calls += 1
        return BACKWARD[case](module, y)

    plain, planned, model = _steps(forward, lambda s: setattr(s, "calls", 0))
    assert plain == planned
    assert model.calls == 8 and model.forward.parts is None and not model.forward.is_online
