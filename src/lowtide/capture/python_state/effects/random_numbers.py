"""Draws from the generators of Python and NumPy in a forward pass.

No operator represents such a draw: the program was captured with the numbers that were drawn. Most models only compare
them with a threshold (layer drop), or hand them to operators. Then the program depends on the comparisons only: a later
call draws the numbers that eager would draw, and if they compare as before, the program is the same. An integer (how
often a block is repeated) may be used for anything, so it must be equal. Numbers that only choose what is checked do
not matter (beartype draws which item of a container it checks). If a model computes with its draws (a mask made by
NumPy), the program holds only for the generator state of its capture.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.code.beside import Code, Variable, places_of
from lowtide.capture.python_state.code.code_names import functions_of
from lowtide.capture.python_state.guards.compared import Comparisons
from lowtide.capture.python_state.guards.reads import Content
from lowtide.capture.trace.patches import all_wrapped, by_thread, telling, wrapped
from lowtide.device import modules
from lowtide.errors import CaptureError
from lowtide.objects.walk import CLOSED, GENERATORS, OWN_GENERATORS, content, reachable
from lowtide.program.scalars import Taken

_SEEDING = ((random, "seed"), (random, "setstate"), (np.random, "seed"), (np.random, "set_state"))
_TORCH_STATE = ("manual_seed", "set_rng_state", "initial_seed")
_CHOOSING = "__beartype_getrandbits"  # the default argument with which beartype's functions draw
_SCALARS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        random,
        ("random", "uniform", "gauss", "normalvariate", "betavariate", "triangular", "expovariate", "gammavariate"),
    ),
    (np.random, ("rand", "random", "random_sample", "uniform", "normal", "randn", "beta", "exponential", "gamma")),
)
_INTEGERS: tuple[tuple[Any, tuple[str, ...]], ...] = ((random, ("randrange", "randint")), (np.random, ("randint",)))
_CHOICES: tuple[tuple[Any, tuple[str, ...]], ...] = ((random, ("choice",)),)

State = tuple[Any, ...]  # of Python's and NumPy's generators


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """The functions that get and set the state of a generator."""
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
    """A context that leaves the generators as they were. Inside, they begin in the state ``start``, if given."""
    before = state()
    if start is not None:
        set_state(start)
    try:
        yield
    finally:
        set_state(before)


@dataclass(slots=True)
class RandomNumber:
    """One drawn number: the function that drew it, and how it was compared with others."""

    function: Callable[..., float]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    comparisons: Comparisons

    def again(self) -> bool:
        """Draw again. Returns whether the new number compares as the old one did."""
        return self.comparisons.hold(self.function(*self.args, **self.kwargs))


@contextlib.contextmanager
def none_by(model: nn.Module, named: Iterable[Any] = ()) -> Iterator[None]:
    """A context that raises ``CaptureError`` if the forward pass inside draws from generators that the model holds or
    that its code has ``named``, or changes the state of PyTorch's."""
    found = {id(one): one for one in (*_generators(model), *named) if all(one is not other for other in GENERATORS)}
    before = [(get(), get, set_state) for get, set_state in map(_accessors, found.values())]
    with contextlib.ExitStack() as stack:
        asked: list[str] = []
        stack.enter_context(wrapped(torch, "seed", _refusing("seed")))
        for owner in (torch, torch.random, *modules()):  # ``fork_rng`` ends with the function in the second
            for name in filter(functools.partial(hasattr, owner), _TORCH_STATE):
                stack.enter_context(wrapped(owner, name, _refusing(name)))
            stack.enter_context(wrapped(owner, "get_rng_state", functools.partial(_noted, asked)))
        stack.enter_context(wrapped(np.random, "default_rng", _seeded))
        try:
            yield
        finally:  # the generator may be the user's own, not a copy
            drawn = [(was, set_state) for was, get, set_state in before if not same_state(was, get())]
            for was, set_state in drawn:
                set_state(was)
    if asked:
        _refuse("get_rng_state")
    if drawn:
        raise CaptureError(
            "the forward pass draws from a random generator of its own (random.Random, numpy.random.Generator), which planned "
            "calls would not. Draw from torch's, or outside the forward pass; or run the model under lowtide.online."
        )


def _generators(model: nn.Module) -> list[Any]:
    """The generators that modules hold, in whatever way."""
    held = [value for module in model.modules() for value in vars(module).values()]
    found = reachable(held, lambda value: not isinstance(value, (*OWN_GENERATORS, *CLOSED)) or inspect.ismethod(value))
    return [one for one in found if isinstance(one, OWN_GENERATORS)]


def _noted(asked: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    def note(*args: Any, **kwargs: Any) -> Any:
        if not str(sys._getframe(2).f_globals.get("__name__")).startswith("torch."):  # a checkpoint asks, to draw again
            asked.append(function.__name__)
        return function(*args, **kwargs)

    return note


def _refusing(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return telling(functools.partial(_refuse, name))


def _refuse(name: str) -> NoReturn:
    raise CaptureError(
        f"the forward pass calls torch.{name}, which planned calls would not. Call it outside the forward "
        "pass, or run the model under lowtide.online."
    )


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
    """What one forward pass drew between two generator states. ``numbers``: all of it; ``None`` if the pass computes
    with some of them."""

    start: State
    end: State
    numbers: tuple[RandomNumber, ...] | None

    @property
    def come_again(self) -> bool:
        """Whether later passes are likely to draw the same."""
        return bool(self.numbers) and all(number.comparisons.kind is int for number in self.numbers or ())

    def hold(self) -> bool:
        """Whether a forward pass that began now would draw numbers that lead to the same program."""
        if same_state(state(), self.start):
            return True
        if self.numbers is None:
            return False
        with untouched():
            return all(number.again() for number in self.numbers)

    def values(self) -> list[Any]:
        """The numbers that a forward pass would draw now."""
        with untouched():
            return [number.function(*number.args, **number.kwargs) for number in self.numbers or ()]

    def take(self) -> None:
        """Leave the generators in the state in which the forward pass would leave them."""
        if self.numbers is None:
            set_state(self.end)
        for number in self.numbers or ():
            number.again()


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """A context that records which functions of Python's and NumPy's generators this thread calls. Other threads may
    draw meanwhile."""
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


def drawn_number(place: int) -> int:
    """The key by which ``Source`` identifies the drawn number at this place."""
    return -1 - place


class RandomRecorder:
    """Follows the draws of forward passes that all begin in the state ``start``, by default the present one. ``taken``:
    what operators take of drawn numbers, by ``drawn_number``; ``None`` if they may take none. ``moved``: operators
    get other numbers instead."""

    def __init__(self, start: State | None = None) -> None:
        self.start = state() if start is None else start
        self.end = self.start
        self.numbers: list[RandomNumber] = []
        self.seeded = False  # whether the forward pass sets the state of a generator
        self.standing = {float, int}  # kinds of drawn numbers for which stand-ins are used
        self.taken: list[Taken] | None = None
        self.moved = False

    @contextlib.contextmanager
    def __call__(self, code: Code, contents: dict[int, Content]) -> Iterator[None]:
        """A context around one forward pass of a model with this ``code``. ``contents``: of holders; those that change
        meanwhile are added."""
        self.numbers, self.seeded = [], False
        with untouched(self.start), contextlib.ExitStack() as stack:
            kinds, beside = code
            stack.enter_context(all_wrapped(_SEEDING, telling(self._note_seed)))
            for kind, drawing in ((float, _SCALARS), (int, _INTEGERS)):
                if kind is int or kind in self.standing:
                    recording = self._recording(kind, kind in self.standing)
                    stack.enter_context(all_wrapped(places_of(drawing, beside), recording))
            choose = _choosing(self._recording(int, stands=False)(GENERATORS[0].randrange))
            stack.enter_context(all_wrapped(places_of(_CHOICES, beside), lambda _: choose))
            for defaults in _of_checking_functions(kinds, beside):
                contents[id(defaults)] = Content(defaults, content(defaults) or ())
                stack.callback(defaults.__setitem__, _CHOOSING, defaults[_CHOOSING])
                defaults[_CHOOSING] = by_thread(self._counting(defaults[_CHOOSING]), defaults[_CHOOSING])
            yield
            self.end = state()
            for number in self.numbers:
                number.comparisons.ended()

    def used_otherwise(self, failed: bool, or_unknown: bool = False) -> bool:
        """Whether the forward pass must be traced again with plain numbers. ``failed``: it raised an error.
        ``or_unknown``: the error may be due to the stand-ins."""
        every = [number.comparisons for number in self.numbers]
        misused = (one for one in every if or_unknown or one.used_otherwise or (one.kept and not failed))
        lost = self.standing & {one.kind for one in misused}
        if float in lost or (not failed and self._is_taken_in_part()):
            lost = {*self.standing}
        self.standing -= lost
        return bool(lost)

    def _is_taken_in_part(self) -> bool:
        """Whether operators take some drawn numbers while others are unknown to later calls."""
        numbers = (one.source.number for one in self.taken or ())
        taken = any(isinstance(number, int) and number < 0 for number in numbers)
        return taken and self.draws is not None and self.draws.numbers is None

    @property
    def draws(self) -> RandomNumbers | None:
        """The draws of the last forward pass; ``None`` if there were none."""
        if same_state(self.start, self.end) and not self.seeded:
            return None
        with untouched(self.start):
            for number in self.numbers:
                number.again()
            complete = same_state(state(), self.end) and not self.seeded
        return RandomNumbers(self.start, self.end, tuple(self.numbers) if complete else None)

    def _note_seed(self) -> None:
        self.seeded = True

    def _recording(self, kind: type, stands: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def recording(function: Callable[..., Any]) -> Callable[..., Any]:
            def draw(*args: Any, **kwargs: Any) -> Any:
                value = function(*args, **kwargs)
                if type(value) is not kind:
                    return value
                comparisons = self._comparisons(kind) if stands else Comparisons.equal_to(value)
                self.numbers.append(RandomNumber(function, args, kwargs, comparisons))
                return comparisons.stand_in(value) if stands else value

            return draw

        return recording

    def _comparisons(self, kind: type) -> Comparisons:
        """The comparisons of the number that is drawn next."""
        if self.taken is None:
            return Comparisons(kind)
        return Comparisons(kind, number=drawn_number(len(self.numbers)), moved=self.moved, taken=self.taken)

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any) -> Any:
            self.numbers.append(RandomNumber(function, args, {}, Comparisons(int)))
            return function(*args)

        return draw


def _choosing(place: Callable[[int], int]) -> Callable[[Sequence[Any]], Any]:
    """Python's ``choice``, which draws a ``place`` in a sequence."""

    def choice(seq: Sequence[Any]) -> Any:
        return seq[place(len(seq)) if len(seq) else 0]

    return choice


def _of_checking_functions(kinds: set[type], variables: Iterable[Variable]) -> list[dict[str, Any]]:
    """The defaults of functions that draw what they check: of the model's classes, and of all functions beside
    these."""
    beside = [value for _, _, value in variables]
    classes = kinds.union(value for value in beside if isinstance(value, type))
    functions = [*beside, *(function for kind in classes for function in functions_of(kind))]
    found = (one.__kwdefaults__ for one in functions if isinstance(one, types.FunctionType))
    return [*{id(defaults): defaults for defaults in found if defaults and _CHOOSING in defaults}.values()]
