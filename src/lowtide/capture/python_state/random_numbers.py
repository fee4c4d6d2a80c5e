"""Draws from the generators of Python and NumPy in a forward pass.

No operator stands for such a draw: the program was made with the numbers that came. Most models only compare them with a
threshold (layer drop). Then the comparisons are what the program depends on: a later call draws the same numbers as eager
would, and where they compare as before the program is the same. Where a model computes with its draws (a mask made by
NumPy), the program holds for the very state of the generators that it was captured with.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.compared import Comparisons
from lowtide.capture.trace.patches import all_wrapped, wrapped
from lowtide.device import modules
from lowtide.errors import CaptureError
from lowtide.program.objects import CLOSED, reachable

GENERATORS: tuple[Any, ...] = (random._inst, np.random.mtrand._rand)  # those that all share
_OWN_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_SEEDING = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))
_TORCH_STATE = ("manual_seed", "set_rng_state", "initial_seed")
_SCALARS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (random, ("random", "uniform")),
    (np.random, ("rand", "random", "random_sample", "uniform")),
)

State = tuple[Any, ...]  # of Python's generator, and of NumPy's


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """What gets the state of a generator, and what sets it."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.RandomState):
        return functools.partial(generator.get_state, legacy=False), generator.set_state
    bits = generator.bit_generator
    return (lambda: bits.state), functools.partial(setattr, bits, "state")


def state() -> State:
    return tuple(_accessors(generator)[0]() for generator in GENERATORS)


def set_state(value: State) -> None:
    for generator, one in zip(GENERATORS, value, strict=True):
        _accessors(generator)[1](one)


def same_state(one: State, other: State) -> bool:
    return pickle.dumps(one) == pickle.dumps(other)


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
class RandomNumber:
    """One number: the function that drew it, and how it compared with others."""

    function: Callable[..., float]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    comparisons: Comparisons = field(default_factory=lambda: Comparisons(float))

    def again(self) -> bool:
        """Draw anew; whether the number compares as it did."""
        return self.comparisons.hold(self.function(*self.args, **self.kwargs))


@contextlib.contextmanager
def none_by(model: nn.Module) -> Iterator[None]:
    """Raises ``CaptureError`` where the forward pass inside draws from generators that the model holds, or gives PyTorch's
    another state."""
    before = [(get(), get, set_state) for get, set_state in map(_accessors, _generators(model))]
    with contextlib.ExitStack() as stack:
        asked: list[str] = []
        stack.enter_context(wrapped(torch, "seed", functools.partial(_refusing, "seed")))
        for owner in (torch, torch.random, *modules()):  # fork_rng ends in the second
            for name in filter(functools.partial(hasattr, owner), _TORCH_STATE):
                stack.enter_context(wrapped(owner, name, functools.partial(_refusing, name)))
            stack.enter_context(wrapped(owner, "get_rng_state", functools.partial(_noted, asked)))
        stack.enter_context(wrapped(np.random, "default_rng", _seeded))
        try:
            yield
        finally:  # a generator may be the user's own, which no copy of the model has
            drawn = [(was, set_state) for was, get, set_state in before if not same_state(was, get())]
            for was, set_state in drawn:
                set_state(was)
    if asked:
        _refusing("get_rng_state", torch.get_rng_state)()
    if drawn:
        raise CaptureError(
            "the forward pass draws from a random generator of its own (random.Random, numpy.random.Generator), which planned "
            "calls would not. Draw from torch's, or outside the forward pass; or run the model under lowtide.online."
        )


def _generators(model: nn.Module) -> list[Any]:
    """Those that modules hold, in whatever way, shared ones excepted."""
    held = [value for module in model.modules() for value in vars(module).values()]
    found = reachable(held, lambda value: not isinstance(value, (*_OWN_GENERATORS, *CLOSED)) or inspect.ismethod(value))
    return [one for one in found if isinstance(one, _OWN_GENERATORS) and all(one is not other for other in GENERATORS)]


def _noted(asked: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Any:
        if not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch."):  # a checkpoint asks, to draw again
            asked.append(function.__name__)
        return function(*args, **kwargs)

    return note


def _refusing(name: str, _: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"the forward pass calls torch.{name}, which planned calls would not. Call it outside the forward "
            "pass, or run the model under lowtide.online."
        )

    return refuse


def _seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(seed: Any = None) -> Any:
        if seed is None:
            raise CaptureError(
                "the forward pass makes a numpy.random.default_rng() without a seed, whose draws planned calls would repeat. "
                "Draw from torch's generator, or outside the forward pass; or run the model under lowtide.online."
            )
        return make(seed)

    return made


@dataclass(frozen=True, slots=True)
class RandomNumbers:
    """What one forward pass drew between two states; ``numbers`` are all of it, or ``None`` where it computes with some."""

    start: State
    end: State
    numbers: tuple[RandomNumber, ...] | None

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


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Inside, the functions of Python's and NumPy's generators that this thread calls are noted: others may draw meanwhile."""
    called: list[str] = []

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            called.append(function.__name__)
            return function(*args, **kwargs)

        return run

    drawing = [
        (module, name)
        for module, generator in zip((random, np.random), GENERATORS, strict=True)
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator
    ]
    with all_wrapped(drawing, noting):
        yield called


class RandomRecorder:
    """Follows the draws of forward passes that all begin in the state ``start``, or in that of now."""

    def __init__(self, start: State | None = None) -> None:
        self.start = state() if start is None else start
        self.end = self.start
        self.numbers: list[RandomNumber] = []
        self.seeded = False  # whether the forward pass gives a generator a state of its own
        self.comparing = True  # as long as drawn numbers are only compared, for all that is known

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around one forward pass."""
        self.numbers, self.seeded = [], False
        with untouched(self.start):
            scalars = [(module, name) for module, names in _SCALARS for name in names if self.comparing]
            with all_wrapped(_SEEDING, self._seeding), all_wrapped(scalars, self._recording):
                yield
            self.end = state()
            for number in self.numbers:
                number.comparisons.ended()

    def used_otherwise(self, failed: bool) -> bool:
        """Whether the forward pass is to be followed anew, with plain numbers; ``failed``: it raised an error."""
        again = self.comparing and any(failed or number.comparisons.used_otherwise for number in self.numbers)
        self.comparing = self.comparing and not again
        return again

    @property
    def draws(self) -> RandomNumbers | None:
        """Of the last forward pass; ``None`` if there were none."""
        if same_state(self.start, self.end) and not self.seeded:
            return None
        with untouched(self.start):
            for number in self.numbers:
                number.again()
            complete = same_state(state(), self.end) and not self.seeded
        return RandomNumbers(self.start, self.end, tuple(self.numbers) if complete else None)

    def _seeding(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            self.seeded = True
            return function(*args, **kwargs)

        return seed

    def _recording(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            if type(value) is not float:
                return value
            self.numbers.append(RandomNumber(function, args, kwargs))
            return self.numbers[-1].comparisons.stand_in(value)

        return draw
