"""The model as a function of tensors alone, made for tracing.

Tracing must change nothing of the user's, and a model's forward may write attributes. So the traced model is a deep copy
of the module tree in which every parameter and buffer is a fake tensor; real data are never copied. Tied parameters are
one input, so that their gradients are summed by the autograd engine itself, in eager's order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.arguments import put_on, rebuilt, refuse_marks
from lowtide.capture.conversions import followed
from lowtide.capture.copies import copy_without_data
from lowtide.capture.gradient_mask import fits, guess_mask
from lowtide.capture.model_state import State
from lowtide.capture.python_state.code import late, process
from lowtide.capture.python_state.code.beside import code_of
from lowtide.capture.python_state.effects import attribute_effects, backward_effects, random_numbers
from lowtide.capture.python_state.effects.argument_effects import ArgumentWrite, ArgumentWrites
from lowtide.capture.python_state.effects.buffer_effects import (
    MadeBuffer,
    declared_buffers,
    new_buffers,
    registered,
    with_states,
)
from lowtide.capture.python_state.effects.random_numbers import RandomRecorder
from lowtide.capture.python_state.effects.returned import with_numbers, with_originals
from lowtide.capture.python_state.effects.snapshots import snapshot
from lowtide.capture.python_state.guards import twice
from lowtide.capture.python_state.guards.caches import Caches, refuse_kept_for
from lowtide.capture.python_state.guards.classes_shown import ClassesShown
from lowtide.capture.python_state.guards.compared import StandIn
from lowtide.capture.python_state.guards.external_effects import ExternalEffects, hooks_in
from lowtide.capture.python_state.guards.noting import NotingClasses
from lowtide.capture.python_state.guards.observe import Observer
from lowtide.capture.python_state.guards.reads import Place, Read, Reads, read_of
from lowtide.capture.python_state.guards.standing import CountedNumber, Numbers, standing_in
from lowtide.capture.python_state.paths import AttributePath, attributes_of, locate, owned, value_at
from lowtide.capture.read_numbers import TensorNumbers
from lowtide.capture.taken_numbers import TakingNumbers
from lowtide.capture.tensor_calls import TensorCalls, compiled_operators_refused, told_as_in_eager
from lowtide.capture.trace.autocast import periods_of_casts
from lowtide.capture.trace.checkpoints import unwrapped
from lowtide.capture.trace.classes import mark_parameters
from lowtide.capture.trace.expected import Expectations
from lowtide.capture.trace.fake_inputs import copy_attributes
from lowtide.capture.trace.known_values import known_value
from lowtide.capture.trace.lifted import refuse_array_writes
from lowtide.capture.trace.origins import origins_announced
from lowtide.capture.trace.patches import replaced
from lowtide.capture.trace.sizes import SymbolicSizes
from lowtide.capture.trace.staying import staying
from lowtide.capture.trace.writes import RefuseWrites, refuse_required
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.places import current
from lowtide.objects.walk import ABSENT, CONTAINERS, is_open, parts_of, reachable
from lowtide.program.distributed.local import distributed, local_results
from lowtide.program.results import GradientMask, Viewed, bases, outputs_of, unreached
from lowtide.program.scalars import CHANGING

NO_SAVED_TENSORS_HOOKS = (
    "the model offloads or packs activations by itself (saved_tensors_hooks), which a plan replaces: switch that off or, where "
    "the model is planned in a call that is checkpointed itself, give rematerialize a sample"
)


@dataclass(frozen=True, slots=True)
class TracedCall:
    """``model(*args, **kwargs)`` taken apart: the model's ``state``, the call's other distinct ``tensors``, and the
    structure of the ``arguments``, which may hold both. ``mask``: for which results a gradient is expected (by default:
    ``guess_mask``). ``sizes``: symbols for the tensors' sizes, if the trace is to serve calls of other sizes too.
    ``distinct``: whether no container is among the arguments twice."""

    model: nn.Module
    state: State
    tensors: list[torch.Tensor]
    arguments: Any
    mask: GradientMask | None = None
    sizes: SymbolicSizes | None = None
    distinct: bool = True
    caches: Caches = field(default_factory=Caches)
    classes: ClassesShown = field(default_factory=ClassesShown)


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What one run of a traced model did.

    - ``result``: the structure of the result, of attributes that are results too, and of what it ``writes`` into arguments.
    - ``requires_grad``, ``mask``, ``viewed``, ``specs``: for each result, whether it requires a gradient, its entry in the
      mask, what it is a view of, and how it is distributed.
    - ``changes``: of attributes. ``settings``: those to plain values. ``unknown``: attributes that got a value that cannot
      be set again. ``derived``: attributes that got numbers read from tensors.
    - ``buffers``: buffers that were registered or replaced. ``rewired``: whether modules have other hooks now.
    - ``unlinked``: see ``Program``. ``told``: numbers and texts written into arguments.
    """

    result: Any
    requires_grad: tuple[bool, ...]
    mask: GradientMask
    viewed: tuple[Viewed, ...]
    changes: attribute_effects.Changes
    settings: tuple[attribute_effects.ValueEffect, ...]
    unknown: tuple[AttributePath, ...]
    buffers: dict[str, MadeBuffer]
    specs: tuple[Any, ...]
    unlinked: tuple[int, ...]
    rewired: bool
    writes: tuple[ArgumentWrite, ...]
    derived: set[AttributePath]
    told: dict[Any, Any]


class TracedModel:
    """The model as a function ``(*tensors) -> tuple of tensors``.

    It takes parameters and buffers, tensors of the arguments, and ``held`` tensors in attributes. ``assigned``: attributes
    whose tensors are results too. ``recorder``: random numbers of Python and NumPy. ``numbers``: how code compares numbers
    that change. ``read``: numbers that Python reads from tensors. ``expectations``: how checks of values go.

    Each call runs a new copy of the model, since a pass may leave (fake) tensors in attributes; ``run`` says what it did,
    ``reads`` what code read in all runs and their backward passes, ``latest_reads`` in the last one.
    """

    def __init__(
        self,
        call: TracedCall,
        held: Sequence[torch.Tensor],
        assigned: Sequence[attribute_effects.TensorEffect],
        recorder: RandomRecorder,
        numbers: Numbers,
        read: TensorNumbers,
        expectations: Expectations,
    ) -> None:
        self.expectations, self.read = expectations, read
        self.call, self.held, self.assigned, self.recorder, self.numbers = call, held, assigned, recorder, numbers
        self.reads, self.latest_reads = Reads(), Reads()
        self.late = set[str]()  # names of what code reads in the backward pass
        self.placed: dict[int, Any] = {}  # how the gradients of distributed inputs lie
        self._keep_casts = torch.is_autocast_cache_enabled()  # the tracer switches that off
        self._call = nn.Module.__call__  # which the tracer changes, too
        self._reached: ExternalEffects | None = None  # of the first run
        self.after_run: Callable[[], None] = lambda: None
        self._run: TracedRun | None = None
        self._backward = contextlib.ExitStack()
        self._modules = NotingClasses()

    def close(self) -> None:
        """Stop recording what code reads, which goes on in the backward pass until then."""
        try:
            self._end_run()
        finally:
            self._modules.remove()

    def _end_run(self) -> None:
        self._backward.close()
        self.reads.add(self.latest_reads)

    @property
    def run(self) -> TracedRun:
        """The last run."""
        assert self._run is not None
        return self._run

    @property
    def has_filled(self) -> bool:
        """Whether the first run has left constants outside the model, or new results in caches of functions."""
        cached = any(results.are_more for results in self.latest_reads.caches.values())
        return cached or (self._reached is not None and bool(self._reached.filled))

    def changing_numbers(self) -> dict[Place, Read]:
        """Numbers in attributes that the last run has changed."""
        changed = [locate(self.call.model, place) for place in self.run.changes.plain]
        places = [(kind, id(found[0]), found[1]) for found in changed if found for kind in ("attribute", "slot")]
        reads = [self.reads.values[place] for place in places if place in self.reads.values]
        return {read.place: read for read in reads if type(current(*read[:3])) in CHANGING}

    def compared(self) -> list[CountedNumber]:
        """The ``numbers`` in attributes that the call counts up, and how. Others got no new value, or a constant."""
        model, counting = self.call.model, {one.read.place[1:]: one.comparisons.counting for one in self.numbers.every}
        places = ((owned(model, place), place) for place, _ in attributes_of(model)) if counting else ()
        return [CountedNumber(place, counting[key]) for key, place in places if key in counting]

    def used_otherwise(self, failed: bool) -> set[Place]:
        """The ``numbers`` that code did not only compare, or that it counts up where planned calls cannot."""
        found = {owned(self.call.model, one.place) for one in self.counted()}
        lost = {
            one.read.place for one in self.numbers.every if one.comparisons.counting and one.read.place[1:] not in found
        }
        kept = {one.read.place for one in self.numbers.every if one.comparisons.kept and not failed}
        return lost | kept | {one.read.place for one in self.numbers.every if one.comparisons.used_otherwise}

    def counted(self) -> tuple[CountedNumber, ...]:
        """Those of the ``numbers`` that the call counts up."""
        return tuple(number for number in self.compared() if number.operations)

    def _number(self, argument: structure.Changing) -> Any:
        """The value or stand-in that a run gets for a number among the arguments that changes; recorded as read."""
        read = read_of(argument)
        self.latest_reads.note(*read)
        found = next((one for known, one in self.numbers.every if known.place == read.place), None)
        return argument.value if found is None else found.stand_in(argument.value)

    def _copy(self, others: Sequence[torch.Tensor]) -> tuple[nn.Module, dict[int, Any]]:
        return copy_without_data(self.call.model, (*self.call.state.registered, *self.held), others)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self._end_run()
        self._backward.enter_context(late.named(self.late))
        self.expectations.begin()
        self.numbers.taken.clear()
        self.read.begin()
        self._modules.add(nn.Module)
        names = self.call.state.names
        reals = (*self.call.state.tensors, *self.call.tensors, *self.held)
        for traced, real in zip(tensors, reals, strict=True):
            copy_attributes(real, traced)
        wholes = self._wholes(tensors, reals)
        mark_parameters(wholes, (*self.call.state.registered, *reals[len(names) :]))
        state, others = wholes[: len(names)], wholes[len(names) :]
        given, held = others[: len(self.call.tensors)], others[len(self.call.tensors) :]
        model, copies = self._copy([*state, *held])
        declared = declared_buffers(model)
        before, hooks = snapshot(model), hooks_in(model)
        self.latest_reads = Reads()
        args, kwargs = rebuilt(self.call.arguments, state, given, self._number)
        writes = ArgumentWrites(self.call.arguments.leaves[0], (args, kwargs), self.call.distinct)
        wanting, marks = [tensor.requires_grad for tensor in tensors], list(map(put_on, wholes))
        with standing_in(self.numbers, copies) as standing:
            self._backward.callback(standing.ended)
            noting = self.latest_reads, self._modules, standing, self.call.classes
            observer = Observer(self.call.model, model, copies, *noting, [*parts_of((args, kwargs))])
            sources = dict(zip(map(id, (*state, *held)), (*self.call.state.registered, *self.held), strict=True))
            self.call.classes.copied({key: own for key, (own, _) in copies.items()} | sources)
            result, reached = self._forward(model, args, kwargs, (state, given, held), observer, writes)
        lasting, pairs = [args, kwargs, *(one for _, one in copies.values())], zip(reals, tensors, strict=True)
        self._backward.callback(refuse_array_writes(lasting, self.latest_reads.holders, pairs))
        among = reachable([args, kwargs], lambda one: is_open(one) or isinstance(one, CONTAINERS))
        given_objects = {id(one): one for one in among}
        seen = observer.originals | given_objects
        twice.refuse_writes(seen, copies, sources, observer.written, self.latest_reads.contents)
        twice.refuse_told_apart(seen, copies, sources, self.latest_reads, given_objects, observer.compares)
        extra = new_buffers(model, names, state)
        refuse_required(tensors, wanting)
        changes = attribute_effects.changes(model, before)
        standing.left_in([result, args, kwargs, *(value_at(model, place) for place in changes.plain)])
        paths = {id(module): path for path, module in model.named_modules()}
        written = sorted((paths[key], name) for key, name in observer.written - standing.counted if key in paths)
        own = {key: original for key, (original, _) in copies.items()}
        own_of = lambda value: own.get(id(value), observer.originals.get(id(value), ABSENT))  # noqa: E731
        settings, unknown = attribute_effects.settings(model, before, changes, written, own_of)
        rewired = hooks != hooks_in(model)
        settings = () if rewired else settings  # a flag says so, but there are no other hooks in the model itself
        assigned = attribute_effects.written(model, before, self.assigned)
        derived = {one.place for one, (_, value) in zip(self.assigned, assigned, strict=True) if type(value) is StandIn}
        flat, result = structure.flatten_distinct((result, assigned, writes.values))
        result = structure.with_argument_slots(result, structure.objects(self.call.arguments))
        result = with_originals(with_numbers(result, self.numbers.every), copies)
        left = with_states(flat, extra)
        refuse_marks(wholes, marks, flat, observer.namespaces.named_by_user())
        flat, specs = local_results(flat, {id(whole): local for whole, local in zip(wholes, tensors, strict=True)})
        hidden = bases(flat, tensors)
        guess = guess_mask(flat, result, left.values()) + (False,) * len(hidden)
        flat += hidden
        mask = self.call.mask if self.call.mask and fits(self.call.mask, flat) else guess
        known = frozenset(name for everywhere in names for name in everywhere)
        without = [tensor.detach() for name, tensor in extra.items() if name not in left]
        left |= {name: len(flat) + number for number, name in enumerate(name for name in extra if name not in left)}
        buffers = registered(model, left, known, declared)
        outputs, viewed = outputs_of([*flat, *without], mask + (False,) * len(without), tensors)
        requires_grad = (*(tensor.requires_grad for tensor in flat), *(False for _ in without))
        rest = buffers, specs, unreached(tensors, flat), rewired, writes.made, derived, writes.told
        self._run = TracedRun(result, requires_grad, mask, viewed, changes, settings, unknown, *rest)
        self.after_run()
        standing.until_ended()
        self._backward.callback(reached.forget_arguments)
        self._backward.enter_context(backward_effects.none_of(model, reached))
        self._backward.enter_context(observer.watching(backward_of=outputs))
        if self.numbers.every or self.recorder.numbers or self.read:  # all calls that follow come to the mode, ours too
            self._backward.enter_context(TakingNumbers())
        return outputs

    def _wholes(self, tensors: Sequence[torch.Tensor], reals: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that the model gets: distributed ones where the real tensors are distributed."""
        noting = [functools.partial(self.placed.__setitem__, number) for number in range(len(tensors))]
        return list(map(distributed, tensors, reals, noting))

    def _forward(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]],
        observer: Observer,
        writes: ArgumentWrites,
    ) -> tuple[Any, ExternalEffects]:
        """Run the model. Returns its result, and what it can write outside itself, which is then undone or refused."""
        constant = _constant if self._reached is None else None
        # Not ``model(...)``: hooks on the model itself also run around each planned ``forward``.
        no_hooks = torch.autograd.graph.disable_saved_tensors_hooks(NO_SAVED_TENSORS_HOOKS)
        code = code_of(model)
        with (
            self.recorder(code, self.latest_reads.contents),
            followed(code, self.read),
            ExternalEffects(model, (*args, *kwargs.values()), constant) as reached,
            random_numbers.none_by(model, reached.generators),
            observer.watching(),
            self.call.caches.without_fakes(self.latest_reads.caches),
            replaced(FunctionalTensor, "__repr__", torch.Tensor.__repr__),
            replaced(nn.Module, "to", staying(nn.Module.to)),
            told_as_in_eager(),
            compiled_operators_refused(),
            no_hooks,
            unwrapped(self.call.model),
            periods_of_casts(self._keep_casts) as period,
            TensorCalls((*self.call.state.registered, *self.held), *tensors, period, self.latest_reads, self.read),
            RefuseWrites(),  # type: ignore[no-untyped-call]
            origins_announced(model, self._call),
        ):
            modes = process.autocast(), torch.is_grad_enabled()
            result = writes.take(model, model.forward(*args, **kwargs))
            refuse_kept_for(observer.copied, self.latest_reads.caches.values())
            if modes != (process.autocast(), torch.is_grad_enabled()):
                raise CaptureError(
                    "the forward pass leaves autocast or the gradient mode in another state than before, which planned calls "
                    "would not. Enter them by a with statement."
                )
        self.reads.add(self.latest_reads)
        self._reached = self._reached or reached
        if reached.lost:
            self._reached.undo()
            reached.refuse()
        return result, reached


def _constant(traced: torch.Tensor) -> torch.Tensor | None:
    """The real constant that eager's first call would have left in place of a traced tensor, if it is one."""
    real = None if traced.requires_grad else known_value(traced, constant=True)
    return real if real is not None and real.device == traced.device else None
