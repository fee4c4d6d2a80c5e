"""Capture: trace a model on fake tensors and convert the joint graph.

``capture`` runs the model's Python code on fake tensors. If a trace shows something that it should have known from the
start, the model is traced again. No operator runs on real activations, and nothing of the user's changes. Operators
that other libraries registered are tried on made-up tensors (``convert.trial``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.capture.arguments import flat_arguments
from lowtide.capture.assembled import assembled, leave_out_unread
from lowtide.capture.contract import Captured, Conditions, Contract
from lowtide.capture.conversions import can_follow
from lowtide.capture.convert.convert import convert
from lowtide.capture.convert.nested_writes import merge_nested_writes
from lowtide.capture.known import Known
from lowtide.capture.model_state import model_state
from lowtide.capture.python_state.effects import attribute_effects
from lowtide.capture.python_state.effects.argument_effects import are_distinct, holders
from lowtide.capture.python_state.effects.backward_effects import BackwardEffectError
from lowtide.capture.python_state.effects.held_inputs import HeldInputs, followed_inputs
from lowtide.capture.python_state.effects.random_numbers import RandomNumbers, RandomRecorder, drawn_number
from lowtide.capture.python_state.guards import counters
from lowtide.capture.python_state.guards.counters import Readers
from lowtide.capture.python_state.guards.external_effects import hooks_kept
from lowtide.capture.python_state.guards.guards import Guards
from lowtide.capture.python_state.guards.reads import Read, read_of
from lowtide.capture.python_state.guards.standing import Numbers
from lowtide.capture.python_state.paths import leaf, sharing
from lowtide.capture.read_numbers import TensorNumbers
from lowtide.capture.refusals import (
    capture_error,
    check,
    refuse_objects,
    refuse_spent,
    written_attributes,
    written_inputs,
)
from lowtide.capture.rehearsal import Effects, rehearse
from lowtide.capture.trace.anomalies import gradients_unchecked
from lowtide.capture.trace.autocast import is_kept, share_casts
from lowtide.capture.trace.fake import AnsweringFakeMode
from lowtide.capture.trace.fake_inputs import fakes_of
from lowtide.capture.trace.joint import export_joint
from lowtide.capture.trace.origins import period_of_casts
from lowtide.capture.trace.packed import refuse_later_terms
from lowtide.capture.trace.patches import CAPTURING
from lowtide.capture.trace.sizes import SymbolicSizes
from lowtide.capture.trace.writes import GradientRequiredError
from lowtide.capture.traced_model import TracedCall, TracedModel
from lowtide.errors import CaptureError, LowtideError, NoGradientError
from lowtide.memory.collector import collector_held
from lowtide.objects import structure
from lowtide.objects.places import current
from lowtide.program.distributed.gathers import with_gathers
from lowtide.program.distributed.local import with_own_sizes
from lowtide.program.items import with_items
from lowtide.program.results import GradientMask
from lowtide.program.scalars import Taken, with_scalars, with_scalars_of

Rewrite = Callable[[torch.fx.GraphModule], None]


@dataclass(frozen=True, slots=True)
class _Trace:
    """A trace that showed nothing new: the joint graph, and what was recorded with it."""

    module: torch.fx.GraphModule
    traced: TracedModel
    held: list[torch.Tensor]
    held_inputs: HeldInputs
    effects: Effects
    questions: tuple[Any, ...]
    draws: RandomNumbers | None
    known: Known


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mask: GradientMask | None = None,
    rewrite: Rewrite | None = None,
    known: Known | None = None,
    sizes: SymbolicSizes | None = None,
    like: Captured | None = None,
) -> Captured:
    """Capture the training program of ``model(*args, **kwargs)``, and its contract.

    ``mask``: for which tensors of the result a gradient will come back, and in which layout; guessed by default, see
    ``gradient_mask.guess_mask``. ``rewrite`` may change the joint graph before it is converted. ``sizes``: make the
    program's sizes symbolic, see ``capture.family``. ``like``: a capture with other sizes, which shows which numbers
    are inputs.

    The call is traced until a trace shows nothing new. Raises ``CaptureError`` if the program depends on data in a way
    that cannot be known before it runs, or uses something unsupported.
    """
    # A trace makes many objects but few cycles, so collections would walk the whole process in vain.
    with CAPTURING, collector_held(), gradients_unchecked():
        state = model_state(model)
        tensors, arguments = flat_arguments(args, kwargs, state.tensors)
        check(model, (*state.tensors, *tensors))
        refuse_spent(structure.objects(arguments))
        distinct = are_distinct(holders(arguments.leaves[0], (args, kwargs or {})))
        call = TracedCall(model, state, tensors, arguments, mask, sizes, distinct)
        known = known or Known()
        given = {read.place: read for read in map(read_of, structure.changing(arguments))}
        recorder, scalars = known.recorder or RandomRecorder(), known.scalars and (sizes is None or like is not None)
        known = replace(known, numbers={**known.numbers, **given}, recorder=recorder, scalars=scalars)
        while True:
            trace, known = _traced(call, known)
            captured = _finished(call, trace, rewrite)
            if not trace.traced.numbers.taken:
                return captured
            found = _with_scalars(call, trace, captured, known, rewrite, like)
            if isinstance(found, Captured):
                return found
            known = found


def _with_scalars(
    call: TracedCall, trace: _Trace, captured: Captured, known: Known, rewrite: Rewrite | None, like: Captured | None
) -> Captured | Known:
    """One capture for all values of numbers that change from call to call and that operators take.

    The call is traced again with other numbers. If the programs differ only in what follows from the numbers, these
    become inputs. With symbolic sizes, their places are those of the capture ``like``. If the programs differ in more,
    returns what the next trace should know: some of the numbers are constants.
    """
    recorder = known.recorder
    assert recorder is not None
    if like is None:
        drawn = {*recorder.standing}
        trace, later = _traced(call, replace(known, moved=True))
        if later.computed != known.computed or recorder.standing != drawn:
            return replace(later, moved=False)
        moved = _finished(call, trace, rewrite)
        reads, taken = trace.traced.numbers.inputs(drawn_number)
        same = moved.contract.same_as(captured.contract)
        program = with_scalars(moved.program, captured.program, taken) if same else None
    else:
        reads, _ = trace.traced.numbers.inputs(drawn_number)
        numbers = [current(*one[:3]) if isinstance(one, Read) else None for one in reads]
        same = replace(captured.contract, scalars=tuple(reads)).numbers == like.contract.numbers and None not in numbers
        program = with_scalars_of(like.program, captured.program, numbers) if same else None
    if program is not None:
        return Captured(with_items(program), replace(captured.contract, scalars=tuple(reads)))
    if not all(isinstance(one, Read) for one in reads):
        recorder.standing.clear()
    computed = known.computed.union(one.place for one in reads if isinstance(one, Read))
    return replace(known, computed=computed, items=known.items and bool(reads))


def _traced(call: TracedCall, known: Known) -> tuple[_Trace, Known]:
    """Trace until a trace shows nothing new. Returns that trace, and what was known before it."""
    while True:
        attempt = _attempt(call, known)
        if not isinstance(attempt, Known):
            return attempt, known
        known = attempt


class _LearnedError(Exception):
    """Raised when the first run of the model shows something that the trace should have known."""

    def __init__(self, known: Known) -> None:
        super().__init__()
        self.known = known


class _ChangedError(Exception):
    """Raised when the first run has changed something outside the model. What a second run does not change again is a
    cache, and the program to capture is that of calls with a filled cache."""


def _attempt(call: TracedCall, known: Known) -> _Trace | Known:
    """Trace the call once. Returns the trace, or what the next one should know if it showed something new."""
    assert known.recorder is not None
    model, recorder, effects = call.model, known.recorder, known.effects
    mode = AnsweringFakeMode(call.sizes, known.expected)
    held, followed = followed_inputs(model, known.follow, (*call.state.registered, *call.tensors))
    fakes = fakes_of(mode, call.state.tensors, (*call.tensors, *held), known.unknown)
    taken: list[Taken] = []
    recorder.taken, recorder.moved = taken if known.scalars else None, known.moved
    taking = recorder.taken if call.sizes is None else None
    read = TensorNumbers(known.items, taking, known.moved, known.converting, known.clocks)
    numbers = Numbers(known.numbers.values(), known.scalars, known.moved, known.computed, taken, read.converted)
    traced = TracedModel(call, held, effects.tensors if effects else (), recorder, numbers, read, mode.expectations)
    outside: list[Read] = []

    def learn() -> None:  # after the first run, before the joint graph is traced in vain
        traced.after_run = lambda: None
        learned = _learned_of_numbers(known, traced)
        if learned is not None:
            raise _LearnedError(learned)
        changed = counters.changed(traced.latest_reads)
        counters.refuse(counters.spent(changed, traced.latest_reads))
        if traced.has_filled or changed:
            raise _ChangedError

    traced.after_run = learn
    try:
        with contextlib.closing(traced), hooks_kept(model):
            try:
                module = export_joint(traced, fakes, mode)
            except _ChangedError:
                module = export_joint(traced, fakes, mode)
        outside = counters.changed(traced.latest_reads)
        learned = _learned_of_numbers(known, traced)
        if learned is not None:
            return learned
        if effects is None and (traced.run.changes or traced.run.rewired or outside or traced.run.told):
            places, left = [one.place for one in traced.compared()], traced.run.changes.tensors
            told = traced.run.told
            effects = rehearse(call, held, traced.reads, outside, places, left, known.expected, read or None, told)
            if known.unknown and not {*left} <= {one.place for one in effects.tensors}:
                return known.without_numbers_read(None)  # the model keeps numbers that the rehearsal took as known
            if effects.tensors or effects.carried:
                return replace(known, effects=effects, follow=known.attributes | effects.carried)
    except _LearnedError as error:
        outside = counters.changed(traced.latest_reads)
        return error.known
    except Exception as error:
        outside = counters.changed(traced.latest_reads)
        if isinstance(error, GradientRequiredError):
            raise
        written = written_attributes(model, error) - known.attributes
        if written:
            return replace(known, effects=effects, follow=known.attributes | written)
        if isinstance(error, BackwardEffectError) and not error.changed & known.changed_backward:
            return replace(known, effects=effects, changed_backward=known.changed_backward | error.changed)
        if recorder.used_otherwise(failed=True):
            return replace(known, effects=effects)
        if read.asking is not None and can_follow(read.asking):
            return replace(known, effects=effects, converting=(*known.converting, read.asking))
        if read.misused:
            return known.without_numbers_read(effects, read.clocked)
        learned = _learned_of_numbers(known, traced, error)
        if learned is not None:
            return learned
        if recorder.used_otherwise(failed=True, or_unknown=True):
            return replace(known, effects=effects)
        if known.unknown or read.clocked:
            return known.without_numbers_read(effects, read.clocked)
        if isinstance(error, LowtideError):
            raise
        raise capture_error(error) from error
    finally:
        counters.put_back(outside, traced.reads)
        mode.forget_values()
    traced.reads.prefer(traced.latest_reads)
    traced.reads.forget(outside)
    if recorder.used_otherwise(failed=False):
        return replace(known, effects=effects)
    if read.misused:
        return known.without_numbers_read(effects, read.clocked)
    read.begin()  # so that kept numbers do not keep the trace alive
    return _Trace(module, traced, held, followed, effects or Effects(), tuple(mode.questions), recorder.draws, known)


def _learned_of_numbers(known: Known, traced: TracedModel, error: BaseException | None = None) -> Known | None:
    """What is known about numbers after a trace, if it is more than before; else ``None``. New is that the call does
    more with numbers than compare them, or that it changes numbers. If the trace failed with an ``error`` for no known
    reason, texts are suspected first, then numbers that operators took, then all numbers."""
    places = traced.used_otherwise(failed=error is not None)
    if error is not None and not places:
        every = {one.read.place for one in traced.numbers.every}
        places = traced.numbers.texts(error) or traced.numbers.places_taken() or every
    if places:
        places = traced.numbers.with_alike(places)
        of = {one.read.place: one.comparisons for one in traced.numbers.every if one.comparisons.answers}
        bounds = {**known.bounds, **{place: of[place] for place in places & of.keys()}}
        return replace(known, computed=known.computed | places, bounds=bounds)
    changing = {} if error is not None or known.effects is not None else traced.changing_numbers()
    numbers = {**changing, **known.numbers}
    return replace(known, numbers=numbers) if numbers.keys() != known.numbers.keys() else None


def _finished(call: TracedCall, trace: _Trace, rewrite: Rewrite | None) -> Captured:
    """Convert the joint graph of a trace to a program, and make its contract."""
    run, effects, held = trace.traced.run, trace.effects, trace.held
    if all(entry is False for entry in run.mask):
        if trace.traced.expectations.answers:
            raise CaptureError(
                "no output of the model requires a gradient where the values that it checks are as such values usually are, so "
                "what it computes depends on the values of floating-point or random tensors."
            )
        raise NoGradientError(
            "no output of the model requires a gradient, so there is nothing to rematerialize: check requires_grad of "
            "the parameters and inputs, and that the model is not under torch.no_grad()."
        )
    inputs, given = (*call.state.tensors, *call.tensors, *held), len(call.state.tensors) + len(call.tensors)
    asked = frozenset[int]().union(*(question.known.positions() for question in trace.questions))
    used = asked.union(viewed.argument for viewed in run.viewed if viewed.argument is not None)
    inputs = inputs[: leave_out_unread(trace.module.graph, given, used)]
    share_casts(trace.module, [i for i, tensor in enumerate(inputs) if is_kept(tensor)], period_of_casts)
    if trace.traced.placed:
        with_own_sizes(trace.module, trace.traced.placed)
    refuse_later_terms(trace.module, others_add=False)
    if rewrite is not None:
        rewrite(trace.module)
    merge_nested_writes(trace.module)
    settings = tuple(setting for setting in run.settings if setting.place not in effects.counted)
    unknown = [place for place in run.unknown if place not in effects.counted]
    trace.traced.reads.refuse_unknown()
    refuse_objects(Readers(call.model, trace.traced.reads).of_objects(unknown))
    attribute_effects.say_unknown(call.model, unknown)
    guards = _guards(call.model, trace, settings)
    program = assembled(convert(trace.module, inputs, run.requires_grad), run, call.state, type(call.model).__name__)
    written = written_inputs(program, inputs)
    program = with_gathers(program, call.state.units, call.state.tensors)
    program = replace(program, placed=tuple(sorted(trace.traced.placed.items())))
    read = used.union(i for i, value in enumerate(program.inputs) if value is not None)
    places = trace.held_inputs.places[: len(inputs) - given]
    followed = HeldInputs(places, frozenset(i for i in range(len(places)) if given + i not in read))
    expected = tuple(trace.traced.expectations.answers)
    names = trace.traced.late.difference(map(leaf, (*run.changes.plain, *run.changes.tensors)))
    late = tuple(read for read in guards[0].reads if read.name in names)
    learned = trace.known.bounds, trace.known.unknown
    conditions = Conditions(trace.questions, guards, trace.draws, followed, written, expected, late, *learned)
    left = settings, trace.traced.counted(), run.buffers
    return Captured(program, Contract(run.result, conditions, effects, *left, run.specs, run.writes))


def _guards(model: nn.Module, trace: _Trace, settings: Sequence[attribute_effects.ValueEffect]) -> tuple[Guards, ...]:
    """Guards for the model as it is now, and, if the next call has the same program, for the model as this call leaves
    it."""
    effects, reads, held = trace.effects, trace.traced.reads, trace.held
    unlike = effects.carried | trace.traced.run.derived
    written = [one.place for one in effects.tensors if not one.once and one.place not in unlike]
    every, told = sharing(model, written), effects.told & set(written)
    guards = Guards.of(model, reads, every, told, held, compared=trace.traced.numbers.every)
    left = [(setting.place, setting.value) for setting in settings if setting.place in trace.traced.run.changes.plain]
    if not left or not effects.settled:
        return (guards,)
    return guards, Guards.of(model, reads, every, told, held, left, trace.traced.numbers.every)
