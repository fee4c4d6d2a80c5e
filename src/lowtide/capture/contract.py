"""What a captured program means for the model: when it holds for a call, and what a planned call does to the model besides."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.catching import catches
from lowtide.capture.python_state.effects import attribute_effects, buffer_effects
from lowtide.capture.python_state.effects.argument_effects import ArgumentWrite
from lowtide.capture.python_state.effects.attribute_effects import ValueEffect
from lowtide.capture.python_state.effects.buffer_effects import MadeBuffer
from lowtide.capture.python_state.effects.held_inputs import HeldInputs
from lowtide.capture.python_state.effects.random_numbers import RandomNumbers, RandomRecorder
from lowtide.capture.python_state.guards.compared import Comparisons
from lowtide.capture.python_state.guards.guards import Guards
from lowtide.capture.python_state.guards.reads import Place, Read
from lowtide.capture.python_state.guards.standing import CountedNumber
from lowtide.capture.python_state.paths import AttributePath, value_at
from lowtide.capture.rehearsal import Effects
from lowtide.capture.trace.patches import CAPTURING
from lowtide.objects import structure
from lowtide.objects.keys import fingerprint
from lowtide.objects.places import current
from lowtide.program import Program
from lowtide.program.distributed.local import formed
from lowtide.program.layouts import memory_of
from lowtide.program.scalars import NUMBERS, as_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """What a program depends on beside the layouts of its inputs: the answers to ``questions`` about their values, what the
    model is like, in one of several ways (``guards``), and what Python and NumPy draw. ``written``: flat inputs that it writes
    into, whose memory no other input may share. ``expected``: how checks of values go, which the program looks at itself.
    ``late``: what code reads in the backward pass, which must be the same when that comes. ``bounds`` and ``unknown``: as of
    ``Known``."""

    questions: tuple[Any, ...] = ()
    guards: tuple[Guards, ...] = (Guards(),)
    draws: RandomNumbers | None = None
    held_inputs: HeldInputs = field(default_factory=HeldInputs)
    written: frozenset[int] = frozenset()
    expected: tuple[bool, ...] = ()
    late: tuple[Read, ...] = ()
    bounds: Mapping[Place, Comparisons] = field(default_factory=dict)
    unknown: frozenset[int] = frozenset()

    def hold(self, modules: Sequence[nn.Module], inputs: list[torch.Tensor], memo: dict[int, Any]) -> bool:
        """Whether a call now has this program. ``modules``: all of the model's, itself first; ``inputs``: flat, without those
        in attributes; ``memo``: of the call."""
        given = self.held_inputs.behind(inputs, modules[0])
        return (
            given is not None
            and self.fit(modules)
            and all(question.holds(given, memo) for question in self.questions)
            and (self.draws is None or self.draws.hold())
            and self.are_apart(given)
        )

    def go(self, expected: Sequence[bool | None]) -> bool:
        """Whether the first checks of values go like this, as far as it says."""
        known = tuple(one for one in expected if one is not None)
        return self.expected[: len(known)] == known

    def are_apart(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether what the program writes into is no other input's memory."""
        if not self.written:
            return True
        memory = Counter(map(memory_of, given))
        return all(memory[memory_of(given[place])] == 1 for place in self.written)

    def fit(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the model is as it has to be."""
        return any(guards.hold(modules) for guards in self.guards)

    def catches(self) -> bool:
        """Whether code that the forward pass could run goes on where an operator fails."""
        return catches(self.guards[-1].functions())

    def changed(self, model: nn.Module) -> str:
        """In words, what of the model is not as it has to be."""
        return "" if self.fit(list(model.modules())) else self.guards[-1].broken(model)

    def changed_since(self) -> str:
        """In words, what code that runs in the backward pass would find to be another one than in the forward pass."""
        with CAPTURING:  # in another thread it replaces some of that meanwhile
            return next((text for text, _ in self.guards[0].changed(self.late)), "")

    def other_tensors(self, model: nn.Module) -> set[AttributePath]:
        """Attributes whose tensors are not those that they have to be."""
        return set() if self.fit(list(model.modules())) else self.guards[-1].other_tensors(model)

    def other_numbers(self, model: nn.Module) -> dict[Place, Read]:
        """Numbers that were read and are not those that they have to be."""
        return {} if self.fit(list(model.modules())) else self.guards[-1].other_numbers(model)

    def compared(self) -> dict[Place, Read]:
        """Numbers that were read, and only compared."""
        return self.guards[-1].compared()

    def places(self) -> set[Place]:
        """Of all that was read."""
        return {read.place for read in self.guards[-1].reads}

    def recorder(self) -> RandomRecorder | None:
        """To capture the same call again, with the same draws."""
        return None if self.draws is None else RandomRecorder(self.draws.start)

    def broken(self, model: nn.Module, inputs: list[torch.Tensor]) -> str:
        """In words, why they do not hold."""
        given = self.held_inputs.behind(inputs, model)
        if given is None:
            return self.changed(model) or "tensors in its attributes are not where they were"
        if not self.are_apart(given):
            return "tensors that it writes into share their memory with others"
        answers = (f"{question.source}: {question.answer}, then {new}" for question, new in self._other_answers(given))
        return self.changed(model) or next(answers, "what is drawn from the generators of Python or NumPy")

    def changed_inputs(self, model: nn.Module, inputs: list[torch.Tensor], numbers: bool = False) -> frozenset[int]:
        """The flat inputs of which a question has another answer; where it is about ``numbers``, another one of these."""
        given = self.held_inputs.behind(inputs, model)
        others = () if given is None else self._other_answers(given)
        asked = (question.known.positions() for question, answer in others if not numbers or _is_of_numbers(answer))
        return frozenset[int]().union(*asked)

    def ask_other_numbers(self, inputs: list[torch.Tensor], model: nn.Module, states: int) -> bool:
        """Whether a question about whole numbers in arguments has another answer for these inputs of ``model``, the first
        ``states`` of which are its own."""
        given = self.held_inputs.behind(inputs, model)
        return given is not None and any(
            not isinstance(answer, bool | float) and max(question.known.positions(), default=0) >= states
            for question, answer in self._other_answers(given)
        )

    @property
    def turn(self) -> bool:
        """Whether a truth value that was asked for is one that the program writes: that it has been initialized, say."""
        return any(isinstance(one.answer, bool) and one.known.positions() & self.written for one in self.questions)

    def _other_answers(self, given: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
        """The questions that have another answer now, and that."""
        memo: dict[int, Any] = {}
        now = ((question, question.asked(given, memo)) for question in self.questions)
        return ((question, answer) for question, answer in now if answer != question.answer)


@dataclass(frozen=True, slots=True, eq=False)
class Contract:
    """What a planned call returns and leaves behind beside what its operators compute.

    ``result_structure`` is of what the model returned, what it left in the attributes ``effects.tensors``, and what it
    ``writes`` into dictionaries, lists and objects among the arguments;
    ``settings`` are the plain values that it left (``effects.attribute_effects``), ``counted`` the numbers that it counted
    on, ``buffers`` those that it registers or replaces, by name; ``specs`` say of each result how it is distributed;
    ``scalars`` are the numbers that are inputs of the program (``program.scalars``): where they are read, or their places among
    those that are drawn.
    ``conditions``: under which all of this, and the program, hold for a call.
    """

    result_structure: Any
    conditions: Conditions
    effects: Effects = field(default_factory=Effects)
    settings: tuple[ValueEffect, ...] = ()
    counted: tuple[CountedNumber, ...] = ()
    buffers: Mapping[str, MadeBuffer] = field(default_factory=dict)
    specs: tuple[Any, ...] = ()
    writes: tuple[ArgumentWrite, ...] = ()
    scalars: tuple[Read | int, ...] = ()

    @property
    def held_inputs(self) -> HeldInputs:
        return self.conditions.held_inputs

    @property
    def numbers(self) -> list[Any]:
        """What tells the ``scalars`` from those of another capture."""
        return [one.place if isinstance(one, Read) else one for one in self.scalars]

    def flat_inputs(
        self, model: nn.Module, inputs: list[torch.Tensor], draws: RandomNumbers | None = None
    ) -> list[torch.Tensor] | None:
        """The flat inputs, with those in the model's attributes, and numbers behind them; ``None`` where they are not all
        there. ``draws``: of the conditions that hold for the call, by default its own."""
        given = self.held_inputs.behind(inputs, model)
        if given is None or not self.scalars:
            return given
        draws = draws or self.conditions.draws
        drawn = draws.values() if draws is not None and not all(isinstance(one, Read) for one in self.scalars) else []
        numbers = (current(*one[:3]) if isinstance(one, Read) else drawn[one] for one in self.scalars)
        return [*given, *map(as_tensor, numbers)]

    def fulfil(
        self, model: nn.Module, tensors: Sequence[torch.Tensor], objects: Sequence[Any], given: Sequence[Any] = ()
    ) -> tuple[Any, list[attribute_effects.Before]]:
        """What the call returns, made of its result ``tensors`` and the ``objects`` among its arguments, after leaving in the
        model, and in what was ``given`` to write into, what it leaves there; and what was in the model before."""
        buffer_effects.put(model, self.buffers, tensors)
        tensors = [formed(*each) for each in itertools.zip_longest(tensors, self.specs)]
        result, left, values = structure.unflatten(self.result_structure, tensors, [*objects, *given])
        for write, value in zip(self.writes, values, strict=True):
            write.perform(given, value)
        written = {*(one.place for one in self.effects.tensors), *(setting.place for setting in self.settings)}
        places = written | {one.place for one in self.counted} | self.held_inputs.attributes()
        before = [attribute_effects.Before(place, value_at(model, place)) for place in places]
        attribute_effects.write(model, zip((one.place for one in self.effects.tensors), left, strict=True))
        attribute_effects.write(model, [(one.place, one.again()) for one in self.settings])
        attribute_effects.write(model, [(one.place, one.change(value_at(model, one.place))) for one in self.counted])
        return result, before

    def returns_as(self, other: Contract) -> bool:
        """Whether a planned call returns the same, and leaves the same tensors in the model."""
        return (
            fingerprint(self.result_structure) == fingerprint(other.result_structure)
            and (self.effects.tensors, self.held_inputs) == (other.effects.tensors, other.held_inputs)
            and (self.buffers, self.specs, self.writes) == (other.buffers, other.specs, other.writes)
        )

    def same_as(self, other: Contract) -> bool:
        """Whether a planned call does the same to the model, whatever it holds for."""
        return (
            self.returns_as(other)
            and [one.key for one in self.settings] == [one.key for one in other.settings]
            and repr(self.counted) == repr(other.counted)
            and self.numbers == other.numbers
        )


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A call of a model: the tensor program, and the contract of its Python code."""

    program: Program
    contract: Contract

    def same_as(self, other: Captured, held: Collection[int]) -> bool:
        """Whether both stand for the same call, see ``Program.same_as``."""
        return self.contract.same_as(other.contract) and self.program.same_as(other.program, held)


def _is_of_numbers(answer: Any) -> bool:
    """Whether it is a number, or a list of such: no truth value, and no shape."""
    return type(answer) in NUMBERS or (type(answer) is list and all(map(_is_of_numbers, answer)))
