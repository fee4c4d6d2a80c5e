"""Rehearse several calls of one copy of a model on fake tensors, to find what they do to its attributes (see
``attribute_effects``)."""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import BackwardCFunction
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture.arguments import rebuilt
from lowtide.capture.conversions import numbers_read
from lowtide.capture.copies import copy_without_data
from lowtide.capture.numbers_left import NumbersLeft, flat, holds, layout, refuse_read
from lowtide.capture.python_state.effects import attribute_effects
from lowtide.capture.python_state.effects.argument_effects import ArgumentWrites
from lowtide.capture.python_state.effects.random_numbers import untouched
from lowtide.capture.python_state.effects.snapshots import Snapshot, snapshot
from lowtide.capture.python_state.guards import counters
from lowtide.capture.python_state.guards.counters import Readers
from lowtide.capture.python_state.guards.external_effects import WHAT_TO_DO, ExternalEffects, hooks_in, refuse_arguments
from lowtide.capture.python_state.guards.reads import Place, Read, Reads
from lowtide.capture.python_state.paths import AttributePath, tensors_in, texts, value_at
from lowtide.capture.read_numbers import TensorNumbers
from lowtide.capture.trace.answers import Answering
from lowtide.capture.trace.classes import mark_parameters
from lowtide.capture.trace.fake import AnsweringFakeMode
from lowtide.capture.trace.fake_inputs import fakes_of
from lowtide.capture.trace.joint import as_traced
from lowtide.capture.trace.known_values import known_value
from lowtide.capture.trace.patches import all_wrapped, telling
from lowtide.capture.traced_model import TracedCall
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.keys import fingerprint
from lowtide.program.distributed.local import like_form
from lowtide.program.results import below

_HOOKING = [(torch.Tensor, "register_hook"), (torch.Tensor, "register_post_accumulate_grad_hook")]
_FEW = 16  # elements of constants that are compared by their values
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Effects:
    """What a rehearsal found.

    - ``tensors``: attributes that get tensors. ``carried``: those whose tensors the next call computes with.
    - ``counted``: attributes that get another plain value in every call.
    - ``told``: attributes of which code may ask more than values of tensors (whether there is one, say). ``grown``: those
      of them that each call leaves in another form.
    - ``settled``: whether the next call has the same program.
    """

    tensors: tuple[attribute_effects.TensorEffect, ...] = ()
    counted: frozenset[AttributePath] = frozenset()
    carried: frozenset[AttributePath] = frozenset()
    told: frozenset[AttributePath] = frozenset()
    grown: frozenset[AttributePath] = frozenset()
    settled: bool = True

    @property
    def come_again(self) -> bool:
        """Whether a later call has the same effects."""
        return self.settled or bool(self.carried)


def rehearse(
    traced: TracedCall,
    followed: Sequence[torch.Tensor],
    reads: Reads,
    outside: Sequence[Read] = (),
    compared: Collection[AttributePath] = (),
    left: Collection[AttributePath] = (),
    expected: Sequence[bool | None] | None = (),
    read: TensorNumbers | None = None,
    told: Mapping[Any, Any] | None = None,
) -> Effects:
    """Find out what a call does to attributes, by several calls of one copy of the model.

    ``reads``: what the model's code reads. ``outside``: what each call changes outside the model, of what it reads.
    ``compared``: attributes that are only compared; planned calls count them up, or set them, too. ``left``: attributes
    in which the call is known to leave tensors. ``read``: how the call reads numbers from computed tensors, if it does.
    ``told``: numbers and texts that the trace wrote into its arguments. The first rehearsed call must write the same;
    otherwise they depend on something that no guard sees.

    Raises ``CaptureError`` if it does not, or if the effects of the calls do not settle; see
    ``effects.attribute_effects``.
    """
    model, state, tensors = traced.model, traced.state, traced.tensors
    mode = AnsweringFakeMode(expected=expected, rehearses=True)
    count = len(state.tensors) + len(followed)
    fakes = fakes_of(mode, state.tensors, (*followed, *tensors))
    reals = (*state.tensors, *followed, *tensors)
    wholes = [like_form(real, fake) for real, fake in zip(reals, fakes, strict=True)]
    mark_parameters(wholes, (*state.registered, *followed, *tensors))
    clone, _ = copy_without_data(model, (*state.registered, *followed), wholes[:count])
    calls: list[RehearsedCall] = []
    readers = Readers(model, reads)
    numbers_left, notes_code = NumbersLeft(), bool(readers.of_any(left))

    def call() -> RehearsedCall:
        with mode:  # each call gets its own inputs
            inputs = [fake.detach().requires_grad_(fake.requires_grad) for fake in wholes[count:]]
        called, before = RehearsedCall(wholes[:count], len(state.tensors), inputs, notes_code), snapshot(clone)
        hooks = hooks_in(clone)
        args, kwargs = rebuilt(traced.arguments, wholes[: len(state.tensors)], inputs, lambda one: one.value)
        writes = ArgumentWrites(traced.arguments.leaves[0], (args, kwargs), traced.distinct)
        outer, variables = ExternalEffects(clone, (*args, *kwargs.values())), counters.as_now(outside)
        mode.expectations.begin()
        reading = numbers_read(clone, read) if read is not None else contextlib.nullcontext()
        with as_traced(), untouched(), traced.caches.without_fakes(), traced.classes, outer, mode, Answering(), reading:
            with called, numbers_left.noticed():
                result = clone.forward(*args, **kwargs)
            if told and not calls and not told.items() <= writes.plain_values().items():
                refuse_arguments()
            called.ended(clone, before, result)
            numbers_left.put(clone, called.changes.tensors, before)
            if (outside or (calls or [called])[0].changes.plain) and called.backward_runs_code(result, readers):
                with called:
                    called.differentiate(result, [*wholes[:count], *inputs])
        called.rewired = hooks != hooks_in(clone)
        called.outside = {read.place for read in counters.changed(variables)}
        return called

    for _ in range(2):
        calls.append(call())
    if calls[0].rewired and calls[0].operators != calls[1].operators:
        raise CaptureError(
            "the forward pass adds or removes hooks, or gives a module another forward method, and the next one does something "
            f"else then, which planned calls would not. {WHAT_TO_DO}"
        )
    if outside or _common(calls, compared) or _other_beside_tensors(calls):
        calls.append(call())  # a third call shows whether changes go on or settle
    always = [one for one in outside if all(one.place in called.outside for called in calls)]  # not another thread's
    lost = outside if outside and calls[1].operators != calls[2].operators else readers.of(always)
    counters.refuse(lost)
    mode.forget_values()
    return _effects(calls, compared, readers)


def _effects(calls: Sequence[RehearsedCall], known: Collection[AttributePath], readers: Readers) -> Effects:
    """What consecutive calls do to attributes other than the ``known`` ones. Raises ``CaptureError``, see
    ``effects.attribute_effects``."""
    first, second = calls[:2]
    every = [place for place in first.changes.tensors if place in second.changes.tensors]
    once = [place for place in first.changes.tensors if place not in every]
    late = [place for place in second.changes.tensors if place not in every]
    carried = [place for place in every if first.left[place].tensors & second.read - first.state]
    grown = [place for place in every if first.left[place].layout != second.left[place].layout]
    growing = [place for place in grown if place in carried]
    if growing:
        raise CaptureError(
            f"every call of the model leaves other shapes in plain attributes ({texts(growing)}) and the next one computes "
            "with them, so no program holds for all calls. Where their shapes settle after some calls, call the model before "
            "it is rematerialized; otherwise run it under lowtide.online."
        )
    counted = _common(calls, known) + _other_beside_tensors(calls)
    constant = not any(first.left[place].tensors & first.depending for place in once)
    same = first.draws == second.draws and (bool(once) or first.operators == second.operators)
    beside = bool(counted) and not set(every).isdisjoint(counted)
    depending = counted if late or not constant or not same or beside else readers.of_attributes(counted)
    if depending:
        raise CaptureError(
            f"the program depends on attributes that its own forward pass changes ({texts(depending)}), or may do so in a "
            "later call. Where they change in the first calls only, call the model before it is rematerialized; keep a number "
            "that is counted on in a buffer (self.register_buffer(...), self.steps.add_(1)), or use lowtide.online."
        )
    if counted:
        _LOG.warning(
            "the forward pass changes plain attributes (%s) in every call, which planned calls leave as they are; nothing "
            "reads them",
            texts(counted),
        )
    refilled = {place for place, left in second.left.items() if left.refilled}
    kept = every if counted else [*every, *once]  # a constant beside a counter is made in every call
    tensors = tuple(attribute_effects.TensorEffect(place, place in refilled, place in once) for place in kept)
    changing = any(place not in counted for place in second.changes.plain)
    settled = same and not once and not late and not carried and not changing
    reading = readers.that_run(first.codes | second.codes) if first.notes_code and second.notes_code else readers
    told = frozenset(reading.of_any(kept))
    numbers = [place for place in told if any(place in call.left and call.left[place].numbers for call in calls)]
    if numbers:
        refuse_read(numbers)
    return Effects(tensors, frozenset(counted), frozenset(carried), told, told.intersection(grown), settled)


def _common(calls: Sequence[RehearsedCall], known: Collection[AttributePath]) -> list[AttributePath]:
    """Attributes, other than the ``known`` ones, that get another plain value in every call."""
    every = [place for place in calls[0].changes.plain if all(place in call.changes.plain for call in calls)]
    return [place for place in every if place not in known]


def _other_beside_tensors(calls: Sequence[RehearsedCall]) -> list[AttributePath]:
    """Attributes in which the last call put other plain values beside the tensors than the call before."""
    last, latter = calls[-1].left, calls[-2].left
    return [place for place in last if place in latter and last[place].plain != latter[place].plain]


class _Left(NamedTuple):
    """What a call left in an attribute: ``tensors`` by id, their ``layout``, whether a container was ``refilled`` (nothing
    of its old content is left), the ``plain`` values put there beside the tensors, and whether a container holds
    ``numbers`` read from tensors."""

    tensors: set[int]
    layout: Any
    refilled: bool
    plain: Any = None
    numbers: bool = False


class RehearsedCall(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode for one forward pass. It records which operators run on which tensors, which tensors are read or moved
    between attributes, which depend on the inputs, and what the pass leaves in the model or changes ``outside``.
    ``rewired``: whether modules have other hooks afterwards.

    ``state``: parameters and buffers (the first ``registered`` ones), then tensors in attributes. ``inputs``: the tensors
    of the call. Tensors are identified by their ids.
    """

    def __init__(
        self, state: Sequence[torch.Tensor], registered: int, inputs: Sequence[torch.Tensor], notes_code: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = set(map(id, state))
        self.depending = {*self.state, *map(id, inputs)}
        # The same tensor has the same number in every call. Tensors in attributes may differ, so they have none.
        self._numbers = {id(tensor): (0, i) for i, tensor in enumerate([*state[:registered], *inputs])}
        self.operators: list[Any] = []
        # This takes time. A profiler of the user's is left alone: it could not be started again from here.
        self.notes_code = notes_code and sys.getprofile() is None
        self.codes = set[types.CodeType]()  # code that ran
        self.read: set[int] = set()
        self.draws = 0
        self.outside: set[Place] = set()
        self.rewired = False
        self.changes = attribute_effects.Changes()
        self.left: dict[AttributePath, _Left] = {}
        self.kept: list[Any] = [state, inputs]
        self._backward = self._hooked = False

    def __enter__(self) -> Self:
        self._noting = all_wrapped(_HOOKING, telling(self._note_hook))
        self._noting.__enter__()
        if self.notes_code:
            sys.setprofile(self._note_code)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self.notes_code:
            sys.setprofile(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._noting.__exit__(*error)

    def _note_code(self, frame: types.FrameType, event: str, _: Any) -> None:
        self.codes.add(frame.f_code)

    def _note_hook(self) -> None:
        self._hooked = True

    def backward_runs_code(self, result: Any, readers: Readers) -> bool:
        """Whether the backward pass may run Python code. All else that it does follows from the forward pass."""
        nodes = below([tensor for tensor in structure.flatten(result)[0] if tensor.requires_grad])
        functions = any(isinstance(node, BackwardCFunction) for node in nodes)
        return self._hooked or functions or readers.name("grad_fn", "get_gradient_edge")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # asks for a device or a layout, and reads nothing
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        self.operators.append((str(function), tuple(map(_text, leaves)), self._numbers_of(leaves)))
        made = enumerate(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self._numbers |= {id(leaf): (len(self.operators), i) for i, leaf in made}
        self.kept += [leaves, result]  # so that no id is used twice
        if self._backward:
            return result
        random = torch.Tag.nondeterministic_seeded in function.tags
        self.draws += random
        self.read |= tensors
        if random or tensors & self.depending:
            self.depending |= {id(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result

    def _numbers_of(self, leaves: Sequence[Any]) -> tuple[tuple[int, int] | None, ...]:
        return tuple(self._numbers.get(id(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def differentiate(self, result: Any, inputs: Sequence[torch.Tensor]) -> None:
        """Run the backward pass and record its operators. They show numbers that a custom function keeps or a hook reads."""
        outputs = [tensor for tensor in structure.flatten(result)[0] if tensor.requires_grad]
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        if outputs and wanted:
            self._backward = True
            torch.autograd.grad(outputs, wanted, [torch.ones_like(one) for one in outputs], allow_unused=True)

    def ended(self, model: nn.Module, before: Snapshot, result: Any) -> None:
        """Record what the finished call returned, and what it left in ``model``."""
        tensors, rest = flat(result)
        self.read |= set(map(id, tensors))  # the call may return what an earlier one left
        self.operators.append((fingerprint(rest), self._numbers_of(tensors)))
        self.changes = attribute_effects.changes(model, before)
        for place in self.changes.tensors:
            value = value_at(model, place)
            items = before.items_of(place, value)
            refilled = items is not None and _emptied(value, items)
            self.left[place] = _Left(set(map(id, tensors_in(value))), layout(value), refilled, numbers=holds(value))
        places = [attribute_effects.TensorEffect(place, left.refilled) for place, left in self.left.items()]
        put = attribute_effects.written(model, before, places)
        self.read |= set(map(id, tensors_in(put)))
        for effect, (_, value) in zip(places, put, strict=True):
            self.left[effect.place] = self.left[effect.place]._replace(plain=fingerprint(flat(value)[1]))


def _emptied(container: Any, before: Any) -> bool:
    """Whether nothing is left of a container's former content."""
    now, then = (item.values() if isinstance(item, dict) else item for item in (container, before))
    return bool(before) and not {*map(id, now)} & {*map(id, then)}


def _text(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    real = known_value(leaf, constant=True) if isinstance(leaf, FakeTensor) else leaf
    with no_dispatch():
        values = real.tolist() if real is not None and real.numel() <= _FEW else ""
    return f"{leaf.dtype}{tuple(leaf.shape)}{values}"
