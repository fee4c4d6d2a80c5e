"""A captured training program: the plain graph, and beside it what torch needs to run it.

The graph (``ir.Graph``) knows names, bytes and dependencies; this module adds, per op, the call that executes it and,
per value, the layout of the tensor. Everything after capture (cost, lowering) reads these two columns.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.attributes import Setting
from lowtide.capture.python_state.draws import Draws, Recorder
from lowtide.capture.python_state.followed import Followed
from lowtide.capture.python_state.guards import Guards
from lowtide.capture.python_state.paths import Place
from lowtide.capture.python_state.registered import Registered
from lowtide.capture.python_state.rehearsal import Effects
from lowtide.ir import Graph
from lowtide.program.keys import fingerprint
from lowtide.program.results import Result


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor argument: the id of the value to pass."""

    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """How to run an op: ``target(*args, **kwargs)`` with every ``Ref``, nested ones too, replaced by its tensor.

    ``positions`` is ``None`` where the target returns a single tensor; otherwise it holds, for each output value of the
    op, its index in the sequence that the target returns.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Layout of a value; ``storage_bytes`` is the size of the whole storage that it lives in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_offset: int
    storage_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Conditions:
    """What a program depends on beside the layouts of its inputs: answers about their values (``capture.fake``), what the model
    is like, in one of several ways (``capture.guards``), and what Python and NumPy draw (``capture.draws``)."""

    questions: tuple[Any, ...] = ()
    guards: tuple[Guards, ...] = (Guards(),)
    draws: Draws | None = None
    followed: Followed = field(default_factory=Followed)

    def hold(self, modules: Sequence[nn.Module], inputs: list[torch.Tensor], memo: dict[int, Any]) -> bool:
        """Whether a call now has this program. ``modules``: all of the model's, itself first; ``inputs``: flat, without those
        in attributes; ``memo``: of the call."""
        given = self.followed.behind(inputs, modules[0])
        return (
            given is not None
            and self.fit(modules)
            and all(question.holds(given, memo) for question in self.questions)
            and (self.draws is None or self.draws.hold())
        )

    def fit(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the model is as it has to be."""
        return any(guards.hold(modules) for guards in self.guards)

    def changed(self, model: nn.Module) -> str:
        """In words, what of the model is not as it has to be."""
        return "" if self.fit(list(model.modules())) else self.guards[-1].broken(model)

    def other_tensors(self, model: nn.Module) -> set[Place]:
        """Attributes whose tensors are not those that they have to be."""
        return set() if self.fit(list(model.modules())) else self.guards[-1].other_tensors(model)

    def recorder(self) -> Recorder | None:
        """To capture the same call again, with the same draws."""
        return None if self.draws is None else Recorder(self.draws.start)

    def broken(self, model: nn.Module, inputs: list[torch.Tensor]) -> str:
        """In words, why they do not hold."""
        given = self.followed.behind(inputs, model)
        if given is None:
            return self.changed(model) or "tensors in its attributes are not where they were"
        memo: dict[int, Any] = {}
        now = ((question, question.asked(given, memo)) for question in self.questions)
        answers = (
            f"{question.source}: {question.answer}, then {new}" for question, new in now if new != question.answer
        )
        return self.changed(model) or next(answers, "what is drawn from the generators of Python or NumPy")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A captured training program.

    ``calls`` has one entry per op and ``metas`` one per value. Flat inputs are the model's parameters and buffers
    (``state_names``, each tensor once), the call's distinct tensors, and tensors in attributes (``followed``);
    ``inputs[i]`` is the value of flat input i, or ``None`` where the program does not read it. ``constants`` are the values of
    other tensors that the model holds. ``tangents[i]`` is the forward output that the i-th ``lowtide.tangent`` op belongs to.
    ``gradients`` pairs a flat input with the value of its gradient. ``mask`` tells for which results a gradient is
    expected, and in which layout (``capture.results.GradientMask``). ``conditions`` are what it depends on beside the layouts.
    ``result_structure`` is of a pair: what the model returned, and what it left in the attributes ``effects.tensors``;
    ``settings`` are the plain values that it left, see ``capture.attributes``.
    ``kept`` are the flat inputs whose first values, overwritten by the forward pass, are its last forward outputs.
    """

    graph: Graph
    calls: tuple[Call, ...]
    metas: tuple[TensorMeta, ...]
    inputs: tuple[int | None, ...]
    constants: dict[int, torch.Tensor]
    tangents: tuple[int, ...]
    gradients: tuple[tuple[int, int], ...]
    results: tuple[Result, ...]
    result_structure: Any
    mask: tuple[bool | tuple[int, ...], ...]
    reassigned: dict[str, Registered]
    conditions: Conditions
    state_names: tuple[tuple[str, ...], ...]
    parameters: int
    kept: tuple[int, ...]
    effects: Effects = field(default_factory=Effects)
    settings: tuple[Setting, ...] = ()

    @property
    def followed(self) -> Followed:
        return self.conditions.followed

    def inputs_of(self, model: nn.Module, inputs: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """The flat inputs, with those in the model's attributes; ``None`` where they are not all there."""
        return self.followed.behind(inputs, model)

    def same_as(self, other: Program, held: Collection[int]) -> bool:
        """Whether both are the same operators on the same operands, with the same results, in the same order. ``held``: the ids
        of tensors in the model's attributes; other constants were made by the forward pass, and are equal if their elements
        are."""
        pairs = [(tensor, other.constants.get(value)) for value, tensor in self.constants.items()]
        return (
            self.graph.without_places() == other.graph.without_places()
            and all(map(_same_call, self.calls, other.calls))
            and all(getattr(self, name) == getattr(other, name) for name in _COMPARED)
            and fingerprint(self.result_structure) == fingerprint(other.result_structure)
            and (self.effects.tensors, self.followed) == (other.effects.tensors, other.followed)
            and repr(self.settings) == repr(other.settings)
            and all(one is two or (id(two) not in held and _equal(one, two)) for one, two in pairs)
        )


_COMPARED = (
    "metas",
    "inputs",
    "tangents",
    "gradients",
    "results",
    "mask",
    "reassigned",
    "state_names",
    "kept",
)


def _same_call(one: Call, other: Call) -> bool:
    return (
        one.target is other.target
        and one.positions == other.positions
        and repr((one.args, one.kwargs)) == repr((other.args, other.kwargs))
    )


def _equal(one: torch.Tensor, two: torch.Tensor | None) -> bool:
    return two is not None and (one.dtype, one.stride()) == (two.dtype, two.stride()) and torch.equal(one, two)
