"""The planned programs of one model by signature of its calls: made on demand, kept, and exchanged for better ones."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture import Known
from lowtide.capture.arguments import flat_arguments
from lowtide.capture.contract import Captured
from lowtide.capture.model_state import State, StateReader
from lowtide.capture.python_state.effects import attribute_effects, buffer_effects
from lowtide.capture.python_state.effects.held_inputs import HeldInputs, held_tensors
from lowtide.capture.trace.questions import Question
from lowtide.capture.trace.sizes import Shapes
from lowtide.errors import CaptureError, ExecutionError, PlanError
from lowtide.memory.arena import Arena, new_arena
from lowtide.memory.collector import collector_held
from lowtide.pipeline import IMPROVABLE, Finish, adapted_plan, captured_program, plan_request, planned_program
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.results import GradientMask
from lowtide.program.sizes import program_device
from lowtide.progress import shown
from lowtide.runtime.programs.changing import ChangingInputs
from lowtide.runtime.programs.entry import Entry, KeptSample, Sample, Signature, lowered, new_call
from lowtide.runtime.programs.fitting import fitted, with_updates
from lowtide.runtime.programs.improving import Improving, ImprovingTogether
from lowtide.runtime.programs.kin import FamilyCall, Kin, Kins, schedules_of
from lowtide.runtime.programs.owning import Owning
from lowtide.runtime.programs.recaptures import Recaptures
from lowtide.runtime.programs.rescue import Rescue
from lowtide.runtime.updates.optimizer import UpdatingOptimizer
from lowtide.settings import Settings
from lowtide.sharing.agreement import several_processes
from lowtide.stage_times import itemised, stage, stage_seconds

_LOG = logging.getLogger(__name__)
_MOST_CONDITIONS = 16  # kept per entry


class Programs:
    """``entries``: by signature; ``latest``: what the last planned call ran; ``shares_budget``: with other programs."""

    shares_budget = False

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model, self._read_state = weakref.ref(model), StateReader()
        self.settings = settings
        self.entries: dict[Signature, list[Entry]] = {}
        self.latest: Entry | None = None
        self.optimizer: UpdatingOptimizer | None = None  # updates parameters inside the backward pass
        self.improving = (ImprovingTogether if several_processes() else Improving)(type(model).__name__)
        self.rescue = Rescue(self)
        self.owning = Owning(self)
        self.changing = ChangingInputs()
        self.in_terms = False  # gradients leave as terms of sums: other code may add to them
        self._kins = Kins(settings.dynamic if settings.compiler == "eager" and not settings.chunked_loss else False)
        self._calls, self._warned = 0, False
        self.adapts = settings.adapts  # plans new sizes at once, from what is known of other sizes
        self.recaptures = Recaptures()
        self._arenas: dict[torch.device, Arena | None] = {}

    def room_for_copies(self, entry: Entry) -> int:
        """Bytes of the budget that a call of ``entry`` leaves free."""
        return entry.plan.budget_bytes - entry.plan.peak_bytes

    def terms_from(self, states: int) -> int | None:
        """The first flat input whose gradient leaves as terms of its sum, or ``None``. The model has the first
        ``states``."""
        return 0 if self.in_terms else None

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ExecutionError("the rematerialized model no longer exists; keep a reference to it.")
        return model

    def find(self, key: Signature, modules: Sequence[nn.Module], inputs: list[torch.Tensor]) -> Entry | None:
        """The entry for a call with this signature whose conditions hold, or ``None``."""
        memo: dict[int, Any] = {}
        for entry in self.entries.get(key, ()):
            for index, conditions in enumerate(entry.conditions):
                if conditions.hold(modules, inputs, memo):
                    entry.conditions.insert(0, entry.conditions.pop(index))
                    self._calls = entry.used = self._calls + 1
                    entry.calls += 1
                    self.improving.exchange(entry)
                    if entry.siblings is not None and entry.version != entry.siblings.version:
                        entry.siblings.take_over(entry, waits=self.shares_budget or self.settings.waits)
                    return self.rescue.within(entry)
        return None

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], State, Any]:
        """Return the flat inputs (parameters, buffers, tensors of the call), the model's state, and the arguments'
        structure."""
        state = self._read_state(self.model)
        tensors, tree = flat_arguments(args, kwargs, state.tensors)
        return [*state.tensors, *tensors], state, tree

    def _make(
        self, key: Signature, sample: Sample, old: Entry | None = None, mask: GradientMask | None = None
    ) -> Entry:
        """Make an entry for a call like ``sample``, or return a known one with the same program. ``old``: the entry for
        the same call with other incoming gradients, when ``mask`` says which gradients arrive now."""
        known = self.entries.get(key, [])
        with stage_seconds() as taken, shown(type(self.model).__name__), collector_held():
            member = None
            if old is not None and mask is not None:
                if not (self.in_terms and old.captured.program.sums):
                    old.captured_for.setdefault(old.captured.program.mask, old.captured)
                captured = old.captured_for.get(mask) or self._capture(sample, mask, Known.of(old.captured))
                old.captured_for[mask] = old.with_its_numbers(captured, self.model)
                kin, shapes = old.kin
                if kin is not None:
                    kin.arrived(mask)
            else:
                kin, shapes, member = self._member(key, sample, *self._flat(*sample.standing())[:2])
                first = known[0].captured.program.mask if known else kin.mask if kin else None
                captured = member.captured if member else self._captured(sample, first)
                held = {id(tensor) for tensor in held_tensors(self.model)}
                same = next((entry for entry in known if captured.same_as(entry.captured, held)), None)
                if same is not None:
                    same.conditions.insert(0, captured.contract.conditions)
                    del same.conditions[_MOST_CONDITIONS:]
                    return same
            arena = self._arena(captured.program)
            usual = with_updates(self, captured.program, key[-1])
            alike = self._kins.alike(usual) if member is None and old is None else None
            relative = FamilyCall(captured, alike) if alike is not None and alike.tells else member
            adapted = relative is not None and bool(relative.branch.measured) and self.adapts
            program, plan = self._fitting(key, captured, sample, relative if adapted else None, old)
            with stage("lowering"):
                runs = lowered(program, plan, arena)
        conditions, for_masks = ([captured.contract.conditions], {}) if old is None else (old.conditions, old.for_masks)
        kept = KeptSample.of(sample, self.model, program_device(program).type)
        most_bytes = self.settings.most_bytes
        entry = Entry(key, captured, plan, runs, conditions, kept, for_masks, arena=arena, most_bytes=most_bytes)
        entry.kin = kin, shapes
        if old is not None:
            entry.captured_for = old.captured_for
        self._added(entry, taken)
        if kin and shapes and program.updated == usual.updated:
            kin.met(entry, shapes, member, measured=not adapted)
            if kin.at_once and not kin.branches and not kin.hopeless:
                kin.extend(self.model, sample, shapes, lambda: captured, self.terms_from(entry.states))
        if alike is not None and program.updated == usual.updated:
            alike.join(entry, measured=not adapted)
        if adapted or member is not None:
            self.recaptures.forget_one(key)
        if self._searches(entry) and (relative is None or relative.branch.wants_search(entry)):
            self._search(entry)
        return entry

    def _added(self, entry: Entry, taken: dict[str, float]) -> None:
        self._keep(entry)
        self.rescue.watch(entry)
        _LOG.info(
            "planned %s: peak %d bytes of %d (%s)",
            type(self.model).__name__, entry.plan.peak_bytes, entry.plan.budget_bytes, itemised(taken),
        )  # fmt: skip

    def _searches(self, entry: Entry) -> bool:
        """Whether to search for a better plan for a new entry while training runs."""
        return entry.plan.overhead > 0 and entry.plan.planner in IMPROVABLE and self.settings.planning == "background"

    def improve(self, entry: Entry) -> None:
        """Search for a better plan for ``entry`` while training runs, if that can help."""
        if self._searches(entry):
            self._search(entry)

    def begin_anew(self) -> None:
        """The budget has changed, or is shared now: end the searches, and lower all entries with new arenas or none."""
        self.improving.stop()
        self._arenas.clear()
        known = (entry for entries in self.entries.values() for entry in entries) if self.settings.arena else ()
        for one in {one for entry in known for one in (entry, *entry.for_masks.values())}:
            one.arena = self._arena(one.program)
            one.lowered = lowered(one.program, one.plan, one.arena)

    def _search(self, entry: Entry) -> None:
        self.improving.add(entry, plan_request(entry.program, entry.plan.costs, entry.plan.budget_bytes, self.settings))

    def _arena(self, program: Program) -> Arena | None:
        """The arena that all programs on this device share, ``None`` without ``settings.arena``."""
        device = program_device(program)
        if self.settings.arena and device not in self._arenas:
            self._arenas[device] = new_arena(device)
        return self._arenas.get(device)

    def _member(
        self, key: Signature, sample: Sample, inputs: list[torch.Tensor], state: State
    ) -> tuple[Kin | None, Shapes | None, FamilyCall | None]:
        """If shapes may vary: the ``Kin`` of the call, the shapes of its tensors, and the call as its family predicts
        it (or ``None``)."""
        kin, shapes = self._kins.of(key, inputs, len(state.tensors))
        if kin is None or shapes is None:
            return None, None, None

        def holds(captured: Captured) -> bool:
            conditions = captured.contract.conditions
            goes = conditions.go(self.recaptures.known.expected or ())
            return goes and conditions.hold(state.modules, inputs, {})

        def asked(held: HeldInputs, question: Question) -> Any:
            given = held.behind(inputs, self.model)
            return None if given is None else question.asked(given, {})

        member = kin.member(shapes, holds, asked)
        if member is None and kin.is_new(shapes):
            terms_from = self.terms_from(len(state.tensors))
            kin.extend(self.model, sample, shapes, lambda: self._captured(sample, None), terms_from)
            member = kin.member(shapes, holds, asked)
        return kin, shapes, member

    def _adapted(self, member: FamilyCall, finish: Finish) -> tuple[Program, Plan] | None:
        program, branch = finish(member.captured.program), member.branch
        if not branch.tells_of(program):
            return None
        known = branch.measured, branch.siblings.schedules
        return program, adapted_plan(program, self.settings, self.model, self._granted(), *known)

    def _keep(self, entry: Entry) -> None:
        """Add an entry, and drop the least recently used one if there are more than ``settings.max_programs``."""
        self._calls = entry.used = self._calls + 1
        self.entries[entry.key] = [*self.entries.get(entry.key, []), entry]
        kept = [one for entries in self.entries.values() for one in entries]
        if len(kept) > self.settings.max_programs:
            oldest = min(kept, key=lambda one: one.used)
            self.entries[oldest.key].remove(oldest)
            self.improving.drop(oldest)
            if not self.entries[oldest.key]:
                del self.entries[oldest.key]

    def _forget(self, key: Signature) -> None:
        """Drop the entries for this signature."""
        for entry in self.entries.pop(key, []):
            self.improving.drop(entry)

    def _captured(self, sample: Sample, mask: GradientMask | None) -> Captured:
        known = self.recaptures.known
        try:
            captured = self._capture(sample, mask, known)
        except CaptureError:  # retry with the values as constants
            if not (known.follow or known.numbers):
                raise
            self.recaptures.known = Known(expected=known.expected)
            return self._capture(sample, mask, self.recaptures.known)
        self.recaptures.learn(captured)
        return captured

    def _capture(self, sample: Sample, mask: GradientMask | None, known: Known | None = None) -> Captured:
        terms_from = self.terms_from(len(self._read_state(self.model).tensors))
        return captured_program(self.model, *sample.standing(), self.settings, mask, known, terms_from)

    def _may_be_apart(self) -> bool:
        """Whether a call can run without a plan after a ``CaptureError``."""
        return False

    def _latest(self, key: Signature) -> Entry:
        """The entry with this signature that ran last, else the newest one."""
        known = self.entries[key]
        return self.latest if self.latest is not None and self.latest in known else known[-1]

    def planned(self, captured: Captured, sample: Sample, finish: Finish, **known: Any) -> tuple[Program, Plan]:
        """Return the program to run and its plan. ``known``: as for ``planned_program``."""
        of = captured, self.model, *sample.standing()
        return planned_program(*of, self.settings, self._granted(), finish, **known)

    def _fitting(
        self,
        key: Signature,
        captured: Captured,
        sample: Sample,
        member: FamilyCall | None = None,
        old: Entry | None = None,
    ) -> tuple[Program, Plan]:
        """Return the program to run for this signature and its plan. ``member``: the call as its family predicts it.
        ``old``: as in ``_make``; its schedule is tried too."""
        known = functools.partial(schedules_of, old if self.adapts else None)

        def planned(finish: Finish) -> tuple[Program, Plan]:
            found = member and self._adapted(member, finish)
            return found or self.planned(captured, sample, finish, known=known)

        fit = functools.partial(fitted, self, captured.program, key[-1])
        return self.owning.fitted(captured.program, fit, planned)

    def plan_anew(self) -> None:
        """Drop all plans, but keep what was captured."""
        for key, entries in list(self.entries.items()):
            for entry in entries:
                entry.for_masks.clear()
            self._forget(key)
        self._kins = Kins(self._kins.dynamic)

    def in_mode(self, entry: Entry, updated: tuple[int, ...]) -> Entry:
        """The entry for the same program in which the optimizer updates the flat inputs ``updated``."""
        key = (*entry.key[:-1], updated)
        known = (one for each in self.entries.get(key, ()) for one in (each, *each.for_masks.values()))
        same: Entry | None = next((one for one in known if one.captured is entry.captured), None)
        if same is not None:
            return self.rescue.within(same)
        with stage_seconds() as taken, shown(type(self.model).__name__), torch.enable_grad(), entry.sample.autocast:
            program, plan = self._fitting(key, entry.captured, entry.sample.on(self.model))
            runs = lowered(program, plan, entry.arena)
        made = Entry(key, entry.captured, plan, runs, entry.conditions, entry.sample, {}, arena=entry.arena)
        made.most_bytes, made.kin = self.settings.most_bytes, entry.kin
        self._added(made, taken)
        self.improve(made)
        return made

    def _granted(self) -> int:
        """The largest budget in bytes of this model's entries, except those of first calls, which do not come again."""
        every = (entry for entries in self.entries.values() for entry in entries)
        return max((e.plan.budget_bytes for e in every if e.captured.contract.effects.come_again), default=0)

    def entry_for(self, mask: GradientMask, old: Entry, inputs: Sequence[torch.Tensor]) -> Entry:
        """The entry for gradients that arrive otherwise than for ``old``, which ran on these flat ``inputs``. It
        replaces ``old``, which is kept in case the two alternate."""
        if old in self.entries.get(old.key, ()):
            old.for_masks[old.program.mask] = old
        entry = old.for_masks.get(mask)
        if entry is None:
            with (
                attribute_effects.undone(self.model, old.before),
                buffer_effects.as_given(self.model, old.captured.contract.buffers, old.program.state_names, inputs),
                old.call_as_it_was(self.model),
            ):
                entry = old.for_masks[mask] = self._make(old.key, old.sample.on(self.model), old, mask)
        others = (one for one in self.entries.get(old.key, ()) if one is not entry and one is not old)
        self.entries[old.key] = [entry, *others]
        return self.rescue.within(entry)

    def _refuse(self, key: Signature, inputs: list[torch.Tensor]) -> None:
        known = self._latest(key) if self.entries.get(key) else None
        what = new_call(self.model, inputs, len(self._read_state(self.model).tensors), known)
        if self.settings.on_new_signature == "error":
            raise PlanError(f'{what}; call with the planned shapes, or pass on_new_signature="plan" (or "eager").')
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}; it runs without a plan, outside the budget.", stacklevel=4)
