"""What a captured program means for its model: for which calls it holds, and what a planned call does to the model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.catching import catches
from lowtide.capture.python_state.effects import attribute_effects, buffer_effects
from lowtide.capture.python_state.effects.argument_effects import ArgumentWrite
from lowtide.capture.python_state.effects.attribute_effects import TensorEffect, ValueEffect
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
    """What a program depends on besides the layouts of its inputs.

    - ``questions``: about values of inputs, with the answers that the program was captured with.
    - ``guards``: what the model must be like; one of them must hold.
    - ``draws``: what the generators of Python and NumPy must return.
    - ``written``: flat inputs that the program writes into. No other input may share their memory.
    - ``expected``: how checks of values go. The program itself looks at these values.
    - ``late``: what code reads in the backward pass. It must still be the same then.
    - ``bounds``, ``unknown``: see ``Known``.
    """

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
        """Whether the program holds for a call now. ``modules``: all modules of the model, the model first. ``inputs``: the
        flat inputs without those in attributes. ``memo``: answers that were already found for this call."""
        given = self.held_inputs.behind(inputs, modules[0])
        return (
            given is not None
            and self.fit(modules)
            and all(question.holds(given, memo) for question in self.questions)
            and (self.draws is None or self.draws.hold())
            and self.are_apart(given)
        )

    def go(self, expected: Sequence[bool | None]) -> bool:
        """Whether the first checks of values go as ``expected`` says, where it is not ``None``."""
        known = tuple(one for one in expected if one is not None)
        return self.expected[: len(known)] == known

    def are_apart(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether no other input shares memory with inputs that the program writes into."""
        if not self.written:
            return True
        memory = Counter(map(memory_of, given))
        return all(memory[memory_of(given[place])] == 1 for place in self.written)

    def fit(self, modules: Sequence[nn.Module]) -> bool:
        """Whether one of the guards holds for the model."""
        return any(guards.hold(modules) for guards in self.guards)

    def catches(self) -> bool:
        """Whether code that the forward pass may run catches errors of operators."""
        return catches(self.guards[-1].functions())

    def changed(self, model: nn.Module) -> str:
        """A text that says what in the model breaks the guards; empty if nothing does."""
        return "" if self.fit(list(model.modules())) else self.guards[-1].broken(model)

    def changed_since(self) -> str:
        """A text that says what has changed since the forward pass, of what code reads in the backward pass; or empty."""
        with CAPTURING:  # a capture in another thread replaces some of it meanwhile
            return next((text for text, _ in self.guards[0].changed(self.late)), "")

    def other_tensors(self, model: nn.Module) -> set[AttributePath]:
        """Attributes with other tensors than the guards require."""
        return set() if self.fit(list(model.modules())) else self.guards[-1].other_tensors(model)

    def other_numbers(self, model: nn.Module) -> dict[Place, Read]:
        """Numbers that were read and differ from what the guards require."""
        return {} if self.fit(list(model.modules())) else self.guards[-1].other_numbers(model)

    def compared(self) -> dict[Place, Read]:
        """Numbers that code read and only compared."""
        return self.guards[-1].compared()

    def places(self) -> set[Place]:
        """The places of everything that was read."""
        return {read.place for read in self.guards[-1].reads}

    def recorder(self) -> RandomRecorder | None:
        """A recorder for capturing the same call again with the same draws."""
        return None if self.draws is None else RandomRecorder(self.draws.start)

    def broken(self, model: nn.Module, inputs: list[torch.Tensor]) -> str:
        """A text that says why the conditions do not hold."""
        given = self.held_inputs.behind(inputs, model)
        if given is None:
            return self.changed(model) or "tensors in its attributes are not where they were"
        if not self.are_apart(given):
            return "tensors that it writes into share their memory with others"
        answers = (f"{question.source}: {question.answer}, then {new}" for question, new in self._other_answers(given))
        return self.changed(model) or next(answers, "what is drawn from the generators of Python or NumPy")

    def changed_inputs(self, model: nn.Module, inputs: list[torch.Tensor], numbers: bool = False) -> frozenset[int]:
        """The flat inputs for which a question has another answer now. ``numbers``: only answers that are numbers."""
        given = self.held_inputs.behind(inputs, model)
        others = () if given is None else self._other_answers(given)
        asked = (question.known.positions() for question, answer in others if not numbers or _is_of_numbers(answer))
        return frozenset[int]().union(*asked)

    def ask_other_numbers(self, inputs: list[torch.Tensor], model: nn.Module, states: int) -> bool:
        """Whether a question about whole numbers in arguments has another answer for these inputs. The first ``states``
        inputs are those of ``model`` itself."""
        given = self.held_inputs.behind(inputs, model)
        return given is not None and any(
            not isinstance(answer, bool | float) and max(question.known.positions(), default=0) >= states
            for question, answer in self._other_answers(given)
        )

    @property
    def turn(self) -> bool:
        """Whether code asks for a truth value that the program itself writes (a flag that says "initialized", say)."""
        return any(isinstance(one.answer, bool) and one.known.positions() & self.written for one in self.questions)

    def _other_answers(self, given: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
        """The questions that have another answer now, each with that answer."""
        memo: dict[int, Any] = {}
        now = ((question, question.asked(given, memo)) for question in self.questions)
        return ((question, answer) for question, answer in now if answer != question.answer)


@dataclass(frozen=True, slots=True, eq=False)
class Contract:
    """What a planned call returns and leaves behind, besides what its operators compute.

    - ``result_structure``: the structure of what the model returned, what it left in the attributes
      ``effects.tensors``, and what it ``writes`` into dictionaries, lists and objects among the arguments.
    - ``conditions``: when the contract and the program hold for a call.
    - ``settings``: plain values that the call leaves in attributes (``effects.attribute_effects``).
    - ``counted``: numbers in attributes that each call counts up.
    - ``buffers``: buffers that the call registers or replaces, by name.
    - ``specs``: for each result, how it is distributed over devices.
    - ``scalars``: numbers that are inputs of the program (``program.scalars``): where each is read, or its place among
      the drawn numbers.
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
        """The ``scalars`` in a form that can be compared with those of another capture."""
        return [one.place if isinstance(one, Read) else one for one in self.scalars]

    def flat_inputs(
        self, model: nn.Module, inputs: list[torch.Tensor], draws: RandomNumbers | None = None
    ) -> list[torch.Tensor] | None:
        """The flat inputs, followed by those in the model's attributes and by numbers; ``None`` if some are missing.
        ``draws``: those of the conditions that hold for the call; by default this contract's."""
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
        """Make the call's result from its result ``tensors`` and the ``objects`` among its arguments. Writes into the model,
        and into the ``given`` arguments, what the call leaves there. Returns the result, and what was in the model
        before."""
        buffer_effects.put(model, self.buffers, tensors)
        tensors = [formed(*each) for each in itertools.zip_longest(tensors, self.specs)]
        result, left, values = structure.unflatten(self.result_structure, tensors, [*objects, *given])
        for write, value in zip(self.writes, values, strict=True):
            write.perform(given, value)
        changed: list[TensorEffect | ValueEffect | CountedNumber] = [
            *self.effects.tensors,
            *self.settings,
            *self.counted,
        ]
        places = dict.fromkeys((*(one.place for one in changed), *self.held_inputs.attributes()))
        before = [attribute_effects.Before(place, value_at(model, place)) for place in places]
        attribute_effects.write(model, zip((one.place for one in self.effects.tensors), left, strict=True))
        attribute_effects.write(model, [(one.place, one.again()) for one in self.settings])
        attribute_effects.write(model, [(one.place, one.change(value_at(model, one.place))) for one in self.counted])
        return result, before

    def returns_as(self, other: Contract) -> bool:
        """Whether planned calls of both return the same, and leave the same tensors in the model."""
        return (
            fingerprint(self.result_structure) == fingerprint(other.result_structure)
            and (self.effects.tensors, self.held_inputs) == (other.effects.tensors, other.held_inputs)
            and (self.buffers, self.specs, self.writes) == (other.buffers, other.specs, other.writes)
        )

    def same_as(self, other: Contract) -> bool:
        """Whether planned calls of both do the same to the model. Conditions are not compared."""
        return (
            self.returns_as(other)
            and [one.key for one in self.settings] == [one.key for one in other.settings]
            and repr(self.counted) == repr(other.counted)
            and self.numbers == other.numbers
        )


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A captured call of a model: its tensor program, and the contract of its Python code."""

    program: Program
    contract: Contract

    def same_as(self, other: Captured, held: Collection[int]) -> bool:
        """Whether both stand for the same call; see ``Program.same_as``."""
        return self.contract.same_as(other.contract) and self.program.same_as(other.program, held)

    def on(self, model: nn.Module) -> Captured:
        """The same as far as it changes the ``model`` as it is: plain values are left out that are there already."""
        settings = tuple(setting for setting in self.contract.settings if not setting.is_there(model))
        return replace(self, contract=replace(self.contract, settings=settings))


def _is_of_numbers(answer: Any) -> bool:
    """Whether an answer is a number or a list of numbers, not a truth value or a shape."""
    return type(answer) in NUMBERS or (type(answer) is list and all(map(_is_of_numbers, answer)))
