"""Draws from the generators of Python and NumPy in a forward pass.

No operator stands for such a draw: the program was made with the numbers that came. Most models only compare them with a
threshold (layer drop). Then the comparisons are what the program depends on: a later call draws the same numbers as eager
would, and where they compare as before the program is the same. Where a model computes with its draws (a mask made by
NumPy), the program holds for the very state of the generators that it was captured with.
"""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowtide.capture.replaced import replaced

GENERATORS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # those that all share
State = tuple[Any, dict[str, Any]]  # of Python's generator, and of NumPy's

_SCALARS: tuple[tuple[Any, str], ...] = (
    (random, "random"),
    (random, "uniform"),
    (np.random, "rand"),
    (np.random, "random"),
    (np.random, "random_sample"),
    (np.random, "uniform"),
)


def state() -> State:
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    return random.getstate(), numpy_state


def set_state(value: State) -> None:
    random.setstate(value[0])
    np.random.set_state(value[1])


def same_state(one: State, other: State) -> bool:
    return one[0] == other[0] and _comparable(one[1]) == _comparable(other[1])


def _comparable(value: dict[str, Any]) -> tuple[Any, ...]:
    """A NumPy state."""
    inner = value["state"]
    return value["bit_generator"], inner["pos"], inner["key"].tobytes(), value["has_gauss"], value["gauss"]


@contextlib.contextmanager
def untouched(start: State | None = None) -> Iterator[None]:
    """The generators are afterwards as before; inside, they begin as in ``start`` where that is given."""
    before = state()
    if start is not None:
        set_state(start)
    try:
        yield
    finally:
        set_state(before)


@dataclass(slots=True)
class Draw:
    """One number: the function that drew it, and how it compared with others: operator, the other number, the answer."""

    function: Callable[..., float]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    comparisons: list[tuple[Callable[[Any, Any], bool], Any, bool]] = field(default_factory=list)
    used_otherwise: bool = False

    def again(self) -> bool:
        """Draw; whether the number compares as it did."""
        value = self.function(*self.args, **self.kwargs)
        return all(compare(value, other) == answer for compare, other, answer in self.comparisons)


@dataclass(frozen=True, slots=True)
class Draws:
    """What one forward pass drew between two states; ``numbers`` are all of it, or ``None`` where it computes with some."""

    start: State
    end: State
    numbers: tuple[Draw, ...] | None

    def hold(self) -> bool:
        """Whether a forward pass that began now would draw what makes the same program."""
        if same_state(state(), self.start):
            return True
        if self.numbers is None:
            return False
        with untouched():
            return all(number.again() for number in self.numbers)

    def take(self) -> None:
        """Leave the generators as the forward pass would."""
        if self.numbers is None:
            set_state(self.end)
        for number in self.numbers or ():
            number.again()


class Recorder:
    """Follows the draws of forward passes that all begin in the state ``start``, or in that of now."""

    def __init__(self, start: State | None = None) -> None:
        self.start = state() if start is None else start
        self.end = self.start
        self.numbers: list[Draw] = []
        self.comparing = True  # as long as drawn numbers are only compared, for all that is known

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one forward pass."""
        self.numbers = []
        with untouched(self.start):
            with contextlib.ExitStack() as stack:
                for module, name in _SCALARS if self.comparing else ():
                    stack.enter_context(replaced(module, name, self._recording(getattr(module, name))))
                yield
            self.end = state()

    def used_otherwise(self, failed: bool) -> bool:
        """Whether the forward pass is to be followed anew, with plain numbers; ``failed``: it raised an error."""
        again = self.comparing and any(failed or number.used_otherwise for number in self.numbers)
        self.comparing = self.comparing and not again
        return again

    @property
    def draws(self) -> Draws | None:
        """Of the last forward pass; ``None`` if there were none."""
        if same_state(self.start, self.end):
            return None
        with untouched(self.start):
            for number in self.numbers:
                number.again()
            complete = same_state(state(), self.end)
        return Draws(self.start, self.end, tuple(self.numbers) if complete else None)

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if type(value) is not float:
                return value
            self.numbers.append(Draw(function, args, kwargs))
            return _Number(value, self.numbers[-1])

        return draw


class _Number:
    """Stands for a drawn number, and can be compared with numbers. Nothing else: the forward pass is followed anew without."""

    __slots__ = ("_draw", "_value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: float, draw: Draw) -> None:
        self._value = value
        self._draw = draw

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        if not isinstance(other, (int, float)):
            raise self._misused()
        answer = compare(self._value, other)
        self._draw.comparisons.append((compare, other, answer))
        return answer

    def _misused(self) -> TypeError:
        self._draw.used_otherwise = True
        return TypeError("a drawn number was not only compared")

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0)

    def __getattr__(self, name: str) -> Any:
        raise self._misused()

    def __repr__(self) -> str:
        raise self._misused()
