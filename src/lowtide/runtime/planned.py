"""A planned ``forward`` that replaces a module's own, with one plan per signature of its calls."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import Known
from lowtide.capture.model_state import NoShapeError, State
from lowtide.capture.python_state.effects.argument_effects import are_distinct, holders
from lowtide.capture.trace.classes import TRACED
from lowtide.capture.trace.expected import Answers
from lowtide.capture.trace.patches import replaced
from lowtide.capture.trace.writes import GradientRequiredError
from lowtide.cost.room import measured_within
from lowtide.dynamic.context import is_inside
from lowtide.errors import CaptureError, NoGradientError
from lowtide.lower import Lowered
from lowtide.objects import structure, ways
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.program.targets import FailedOperatorError, UnexpectedValueError
from lowtide.runtime import caller
from lowtide.runtime.calls.step import run
from lowtide.runtime.checked import check, is_due
from lowtide.runtime.programs.call_values import CallValues
from lowtide.runtime.programs.entry import Entry, Sample, Signature, signature
from lowtide.runtime.programs.programs import Programs
from lowtide.runtime.programs.recaptures import UnusualCalls
from lowtide.settings import Settings
from lowtide.sharing.agreement import several_processes
from lowtide.sharing.pass_budget import pass_bytes
from lowtide.stage_times import stage_seconds

_LOG = logging.getLogger(__name__)
UNPLANNED = object()


class Planned(Programs):
    """The planned ``forward`` of one module. Calls in evaluation mode or without gradients run the original."""

    _lowtide_runtime = True

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._begin(model, settings, model.forward, "forward" in model.__dict__)

    def _begin(
        self, model: nn.Module, settings: Settings, original_forward: Callable[..., Any], had_instance_forward: bool
    ) -> None:
        super().__init__(model, settings)
        self.given_forward = original_forward
        self.had_instance_forward = had_instance_forward
        functools.update_wrapper(self, original_forward, updated=())
        self.ran = 0  # number of calls that ran by a plan
        self.unusual = UnusualCalls()
        self.values = CallValues(model)
        self._early: dict[Signature, tuple[int, ...]] = {}  # inputs to mark with requires_grad before the call
        self.is_unusual = False  # while a program for an unusual call is made
        self._said_transformed = self._said_copied = False
        self._prepares = False  # plans outside of a step, so the budget does not limit measuring

    @property
    def __globals__(self) -> dict[str, Any]:
        """Refuse ``torch.jit.script``, which reads this attribute to compile a function's source. A plan has none."""
        raise AttributeError(
            "a rematerialized model cannot be scripted; call lowtide.restore(model) first, or trace it."
        )

    @property
    def original_forward(self) -> Callable[..., Any]:
        """That of the model's class as it is now, or the given one if the model had its own or a replacement."""
        model: Any = self._model()
        now = getattr(type(model), "forward", None)
        if self.had_instance_forward or getattr(self.given_forward, "__self__", None) is not model:
            return self.given_forward
        return types.MethodType(now, model) if isinstance(now, types.FunctionType) else self.given_forward

    @torch.compiler.disable(reason="a rematerialized model runs by its plan")  # type: ignore[no-untyped-call, untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # as in an export
            return self.original_forward(*args, **kwargs)
        copied = caller.copied_module(self, self._model(), caller.calling(sys._getframe(1)))
        return self.call(*args, **kwargs) if copied is None else self._run_copied(copied, args, kwargs)

    def _run_copied(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self._said_copied:
            self._said_copied = True
            _LOG.warning(caller.COPIED, type(module).__name__)
        caller.let_go(module, self)
        return module.forward(*args, **kwargs)

    def is_copied_in(self, module: nn.Module) -> bool:
        """Whether ``module`` is not the model but has this object as its ``forward``."""
        return caller.has_copied(module, self, self._model())

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call that is for the model itself."""
        model = self.model
        if args and args[0] is model:  # accelerate made this object a method of the model when it unwrapped it
            model.forward, args = self, args[1:]
        if not self._is_trained() or not torch.is_grad_enabled():
            return self._run_as_it_is(args, kwargs)
        if is_inside():
            _LOG.info("%s runs without a plan inside lowtide.online: within that budget", type(model).__name__)
            return self._run_as_it_is(args, kwargs)
        if caller.is_transformed():
            if not self._said_transformed:
                self._said_transformed = True
                _LOG.warning(caller.TRANSFORMED, type(model).__name__)
            return self._run_as_it_is(args, kwargs)
        try:
            inputs, state, tree = self._flat(args, kwargs)
        except NoShapeError:  # lazy parameters: this call sets their shapes
            return self._run_as_it_is(args, kwargs)
        as_part = any(isinstance(tensor, TRACED) for tensor in inputs)  # called in the capture of a larger model
        if as_part or not any(tensor.requires_grad for tensor in inputs):
            return self._run_as_it_is(args, kwargs)
        changing = self.values.standing(tree.leaves[0])
        if changing:
            tree = structure.Nested(tree.spec, (ways.with_values(tree.leaves[0], changing), *tree.leaves[1:]))
        result = self._run(Sample(args, kwargs, changing), inputs, state, tree)
        if result is not UNPLANNED:
            return result
        del inputs, state, tree  # the call may replace these tensors: do not keep them alive
        return self._run_unplanned(args, kwargs)

    def _run(self, sample: Sample, inputs: list[torch.Tensor], state: State, tree: Any) -> Any:
        """Run a call with gradients by its plan. Returns ``UNPLANNED`` if it has none."""
        entry = self._entry(sample, inputs, state, tree)
        if entry is None:
            return UNPLANNED
        return self._run_planned(entry, sample, inputs, tree)

    @property
    def kind(self) -> tuple[type, str] | None:
        """A key that modules with the same program share, ``None`` if there are no such modules."""
        return None

    def _is_trained(self) -> bool:
        return self.model.training

    def _run_unplanned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self._run_as_it_is(args, kwargs)

    def _run_as_it_is(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.original_forward(*args, **kwargs)

    def _fill_zeroed(self) -> None:
        """A call without a plan begins, and its gradients are added to existing ones: make those real tensors."""
        if self.optimizer is not None:
            self.optimizer.fill_zeroed()

    def _run_planned(self, entry: Entry, sample: Sample, inputs: list[torch.Tensor], tree: Any) -> Any:
        model, contract, draws = self.model, entry.captured.contract, entry.conditions[0].draws
        if is_due():
            planned = entry.captured
            check(lambda: self._capture(sample, planned.program.mask, Known.like(planned)), planned, model)
        flat = contract.flat_inputs(model, inputs, draws) or inputs
        given = holders(tree.leaves[0], (tuple(sample.args), sample.kwargs)) if contract.writes else ()
        if not are_distinct(given):
            return UNPLANNED
        try:
            outputs = self.run(entry, flat)
        except UnexpectedValueError as error:
            number = error.number
        except FailedOperatorError as error:
            self._run_failed(entry, inputs, str(error.__cause__))
            return UNPLANNED
        else:
            self.ran += 1
            if draws is not None:
                draws.take()
            tensors = [result.form(outputs, flat) for result in entry.program.results]
            result, entry.before[:] = contract.fulfil(model, tensors, structure.objects(tree), given)
            return result
        other = self._otherwise(entry, number, sample, inputs)
        if other is None:
            return UNPLANNED
        return self._run_planned(other, sample, inputs, tree)

    def _run_failed(self, entry: Entry, inputs: list[torch.Tensor], why: str) -> None:
        """An operator of a call failed, and its own code may catch the error: run that, in parts if possible."""
        with contextlib.suppress(CaptureError):
            self._run_apart(entry.key, inputs, CaptureError(f"where an operator of it fails: {why}"), always=False)

    def _otherwise(self, entry: Entry, number: int, sample: Sample, inputs: list[torch.Tensor]) -> Entry | None:
        """The entry for a call like those of ``entry`` until check ``number`` of a value goes the other way; tried
        first from now on."""
        expected, modules = entry.captured.contract.conditions.expected, list(self.model.modules())
        wanted = (*expected[:number], not expected[number], *[None] * (len(expected) - number - 1))
        found = next((one for one in self.entries.get(entry.key, ()) if one.goes(wanted, modules, inputs)), None)
        if found is None:
            found = self._unusual(entry.key, sample, inputs, wanted)
        if found is not None and found in self.entries.get(entry.key, ()):
            self.entries[entry.key].sort(key=lambda one: one is not found)
        return found

    def _unusual(self, key: Signature, sample: Sample, inputs: list[torch.Tensor], expected: Answers) -> Entry | None:
        """Make a program for a call whose first checks of values go as ``expected`` says; ``None`` if such calls run
        without a program."""
        why = self.unusual.why(key, expected)
        if not why:
            try:
                with replaced(self, "is_unusual", True):
                    return self._new_entry(key, sample, inputs, expected)
            except NoGradientError:
                raise
            except CaptureError as error:
                why = str(error)
                self.unusual.note(key, expected, why)
        usual = self.unusual.are_usual(key, sum(entry.calls for entry in self.entries.get(key, ())))
        self._run_apart(
            key, inputs, CaptureError(f"where a value that it checks is not as it usually is: {why}"), usual
        )
        return None

    def _run_apart(self, key: Signature, inputs: list[torch.Tensor], error: CaptureError, always: bool) -> None:
        """Handle a call that cannot be captured: run it, or with ``always`` all calls like it, without a whole plan.
        Raises ``error`` if there is no other way to run it."""
        raise error

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan for calls with these arguments now, without running them."""
        with replaced(self, "_prepares", True), torch.enable_grad():
            entry = self._entry(Sample(args, kwargs), *self._flat(args, kwargs))
        if entry is not None and not entry.calls:
            entry.calls = -1  # the call itself follows later

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward pass of the planned program and return its outputs."""
        self.latest = entry

        def for_mask(mask: GradientMask, keeps: bool, held: bool, given: Sequence[torch.Tensor]) -> Lowered:
            if held:
                self.owning.leave()
            same = mask == entry.program.mask and not (held or (self.in_terms and entry.program.sums))
            other = entry if same else self.entry_for(mask, entry, given)
            return (self.in_mode(other, ()) if keeps else other).lowered

        copied = self.changing.copied(entry, inputs, self)
        noted = functools.partial(self.changing.note, entry)
        late = entry.conditions[0].changed_since if entry.conditions[0].late else None
        terms_from, catches = self.terms_from(entry.states), entry.conditions[0].catches
        return run(
            entry.lowered, inputs, for_mask, terms_from, self.optimizer, self.rescue, (copied, noted), late, catches
        )

    def _entry(self, sample: Sample, inputs: list[torch.Tensor], state: State, tree: Any) -> Entry | None:
        """The planned program for this call, made now if it is new; ``None`` if the call runs without a plan."""
        key = self._key(inputs, state, tree)
        if key in self._early:
            entry = self._with_required(self._early[key], self._known, (sample, inputs, state))
            if entry is not None:
                return entry
            del self._early[key]  # no longer valid
        try:
            return self._found(key, sample, inputs, state)
        except GradientRequiredError as error:
            numbers = self._early[key] = error.numbers
        if len(self._early) > self.settings.max_programs:
            del self._early[next(iter(self._early))]
        return self._with_required(numbers, self._found, (sample, inputs, state))

    def _with_required(
        self, numbers: Sequence[int], find: Callable[..., Entry | None], call: tuple[Sample, list[torch.Tensor], State]
    ) -> Entry | None:
        """Call ``find`` with ``requires_grad`` of the numbered inputs flipped. They stay flipped if an entry is found
        and the call is about to run."""
        sample, given, known = call
        given = [*known.registered, *given[len(known.registered) :]]

        def found() -> Entry | None:
            inputs, state, tree = self._flat(*sample.standing())
            return find(self._key(inputs, state, tree), sample, inputs, state)

        return caller.with_required([given[number] for number in numbers], found, stays=not self._prepares)

    def _key(self, inputs: list[torch.Tensor], state: State, tree: Any) -> Signature:
        key = signature(state.modules, inputs, state.names, tree)
        return key if self.optimizer is None else (*key, self.optimizer.updated(inputs))

    def _found(self, key: Signature, sample: Sample, inputs: list[torch.Tensor], state: State) -> Entry | None:
        return self._known(key, sample, inputs, state) or self._new_entry(key, sample, inputs)

    def _known(self, key: Signature, _: Sample, inputs: list[torch.Tensor], state: State) -> Entry | None:
        found = self.find(key, state.modules, inputs)
        if found is None and self.optimizer is not None:
            others = [other for other in self.entries if other[:-1] == key[:-1] and other != key]
            known = next((entry for other in others if (entry := self.find(other, state.modules, inputs))), None)
            found = None if known is None else self.in_mode(known, key[-1])
        if found is not None:
            self.recaptures.novelty.came(found)
        return found

    def _new_entry(
        self, key: Signature, sample: Sample, inputs: list[torch.Tensor], expected: Answers | None = None
    ) -> Entry | None:
        """Make a planned program for a new kind of call. Returns ``None`` if such calls run eagerly by the settings, or
        inside the online mode. ``expected``: how the first checks of values go, if this is the reason for the new
        program."""
        if is_inside():
            return None
        if self.entries and self.settings.on_new_signature != "plan":
            self._refuse(key, inputs)
            return None
        known = self.entries.get(key, [])
        with contextlib.nullcontext() if self._prepares else measured_within(self._pass_bytes):
            if expected is not None:
                with self.recaptures.unexpected(known, self.model, expected):
                    return self._make(key, sample)
            may_go_without = self._may_go_without(inputs)
            if may_go_without and not several_processes():  # processes would do so at different times
                self.recaptures.refuse_more()
            if known:
                self.recaptures.changed(key, known, self._latest(key), self.model, inputs, may_go_without)
            elif self.latest is not None:
                self.recaptures.seen_since(self.latest, self.model)
            with stage_seconds() as taken:
                entry = self._make(key, sample)
            self.values.settle(sample, entry.captured)
            self.recaptures.novelty.came(entry, sum(taken.values()) if "capture" in taken else 0.0)
            self.recaptures.say_values(entry, self.entries, self.model)
            return entry

    def _may_go_without(self, inputs: Sequence[torch.Tensor]) -> bool:
        """Whether a call with these flat inputs can run without a plan, if most calls would need a capture."""
        return self._may_be_apart()

    def _pass_bytes(self, program: Program) -> int:
        return pass_bytes(program, self.settings, self.model, self._granted())

    def end(self) -> None:
        """End the searches for better plans, and optimizer updates inside backward passes."""
        self.improving.stop()
        if self.optimizer is not None:
            self.optimizer.end()

    @property
    def __code__(self) -> Any:
        """The code of the model's own ``forward``, where ``torch.export`` reads argument names."""
        return self.original_forward.__code__
