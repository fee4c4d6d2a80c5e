"""Run a model by plans: as a whole, or in parts if it cannot be captured as one program."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.budget import parse_budget
from lowtide.capture import Captured
from lowtide.capture.model_state import State
from lowtide.capture.trace.expected import Answers
from lowtide.capture.trace.writes import GradientRequiredError
from lowtide.errors import CaptureError, InfeasibleBudgetError, NoGradientError, OnlineBudgetError
from lowtide.memory.arena import Arena
from lowtide.pipeline import Finish
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.distributed.local import hooked
from lowtide.program.distributed.sharded import is_sharded
from lowtide.program.sizes import device_of_inputs, kept_bytes
from lowtide.runtime.calls.differentiated import DifferentiatedAgain, OwnCall
from lowtide.runtime.calls.waiting import WaitingCalls
from lowtide.runtime.online_calls import OnlineCalls
from lowtide.runtime.online_instead import OnlineInstead
from lowtide.runtime.parts.parts import Parts
from lowtide.runtime.parts.submodules import can_run_in_parts
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry, Sample, Signature
from lowtide.runtime.programs.recaptures import ManyProgramsError
from lowtide.runtime.sharded_root import ShardedRoot
from lowtide.settings import Settings

_LOG = logging.getLogger(__name__)
_MOST_WITHOUT_GRADIENT = 3  # captures per signature that found no result with a gradient


class Rematerialized(Planned):
    """The planned ``forward`` of one model. ``parts``: planned parts of a model that cannot run as a whole."""

    def _begin(
        self, model: nn.Module, settings: Settings, original_forward: Callable[..., Any], had_instance_forward: bool
    ) -> None:
        self._root = ShardedRoot(model, original_forward) if is_sharded(model) else None
        if self._root is not None:
            original_forward = self._root
            settings = dataclasses.replace(settings, planning="wait", dynamic=False)  # all ranks run one plan at a time
        super()._begin(model, settings, original_forward, had_instance_forward)
        self.parts: Parts | None = None
        self._former: Parts | None = None  # the parts, while the model is tried as a whole again
        self._runs_in_parts = False  # whether a call ran in parts
        self._was_whole = False  # in parts only because its program changes from call to call
        self._stays_whole = False  # decided how to run: parts are not tried again
        self._apart: set[Signature] = set()  # signatures of calls that could not be captured
        self._without_gradient: Counter[Signature] = Counter()  # captures whose results had no gradient
        self._online: OnlineCalls | None = None
        self._instead = OnlineInstead(settings)
        self.differentiated = DifferentiatedAgain(type(model).__name__)
        self._waiting = WaitingCalls(type(model).__name__, settings.in_flight)

    def _begin_anew(self) -> None:
        """Start over: FSDP2 has sharded the model since (as trainers do), so old plans are for another model."""
        self.improving.stop()
        optimizer = self.optimizer
        self._begin(self.model, self.settings, self.given_forward, self.had_instance_forward)
        self.optimizer = optimizer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.parts is not None and self.parts.is_called:  # the model calls itself
            return self.original_forward(*args, **kwargs)
        if self.parts is not None and not self._was_whole and self.parts.beginning.has_turned():
            self._former = self.parts
            self._go_back()
        if self._online is not None and not self._wants_plan(self._online, (args, kwargs)):
            return self._run_online(args, kwargs)
        if self._root is None and is_sharded(self.model):
            self._begin_anew()
        if self._root is None:
            return super().call(*args, **kwargs)
        args, kwargs = self._root.received(args, kwargs)
        return self._root.handed(super().call(*args, **kwargs))

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        args, kwargs = (args, kwargs) if self._root is None else self._root.received(args, kwargs)
        super().prepare(*hooked(self.model, args, kwargs))

    def _run(self, sample: Sample, inputs: list[torch.Tensor], state: State, tree: Any) -> Any:
        self._instead.watch(inputs, len(state.tensors))
        kind = self.differentiated.kind_of(inputs, sys._getframe(1)) if self._root is None else None
        if kind is not None:
            own = None if self.optimizer is None else OwnCall(inputs[: len(state.tensors)], self.optimizer)
            return self.differentiated.run(kind, self.original_forward, sample.args, sample.kwargs, own)
        self._split_waiting()
        try:
            return super()._run(sample, inputs, state, tree)
        except NoGradientError as error:
            _LOG.info("a call of %s runs without a plan: %s", type(self.model).__name__, str(error))
            return self._run_as_it_is(sample.args, sample.kwargs)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        outputs = super().run(entry, inputs)
        self._waiting.add(outputs)
        self._instead.called()
        return outputs

    def terms_from(self, states: int) -> int | None:
        """As of ``Programs``, but by default gradients of arguments leave as terms: other code may use arguments
        too."""
        otherwise = self.in_terms or self._root is not None or self.settings.compiler != "eager"
        return super().terms_from(states) if otherwise else states

    def _may_split(self) -> bool:
        """Whether gradients leave as sums but could leave as terms: not if ``in_flight`` > 1, with a pass for each
        call."""
        plain = self.optimizer is None and self._root is None and self.settings.compiler == "eager"
        return plain and not self.in_terms and not self._waiting.summed and self.settings.in_flight == 1

    def _run_as_it_is(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if torch.is_grad_enabled():
            self._split_waiting()
            self._fill_zeroed()
        return super()._run_as_it_is(args, kwargs)

    def _split_waiting(self) -> None:
        """Another call begins, whose gradients arrive before those of waiting calls: gradients leave as terms now."""
        if self._may_split() and self._waiting.supersede():
            self._leave_in_terms(True)

    def _leave_in_terms(self, in_terms: bool) -> None:
        self.in_terms = in_terms
        for entry in (one for entries in self.entries.values() for one in entries):
            entry.captured_for.clear()
        self.plan_anew()

    def _run_unplanned(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self._fill_zeroed()
        if self._was_whole and self.parts is not None and self.parts.are_none:
            self._go_whole("nothing of it can be planned in parts", args, kwargs)
            return self.call(*args, **kwargs)
        began = False
        try:
            budget_bytes = None if self.parts is None else self.parts.online_bytes((args, kwargs))
            if self.parts is None:
                result = self._run_online(args, kwargs)
            elif budget_bytes is not None:
                self._go_online(self.parts.why, budget_bytes, self.parts.device, may_exceed=self.parts.are_none)
                result = self._run_online(args, kwargs)
            else:
                with self.parts.installed():
                    began = True
                    result = self.parts.call(self.original_forward, args, kwargs)
                self.parts.ran(result)
            self._instead.called(self.parts.shared if self.parts else None)
        except Exception as error:
            if isinstance(error, InfeasibleBudgetError):
                error.midway = began
                if not began and (self._was_whole or self._may_be_online((args, kwargs))):
                    self._go_whole(error, args, kwargs)
                    return self.call(*args, **kwargs)
            if (self.parts or self._online) and not (self._runs_in_parts or isinstance(error, OnlineBudgetError)):
                self._go_back()  # the call itself was at fault
            raise
        self._runs_in_parts = bool(self._apart)  # not if only this one call failed
        if self.optimizer is not None and (self.parts is not None or self.is_online):
            self.optimizer.give_up(f"the model runs {'under lowtide.online' if self.is_online else 'in parts'}")
        return result

    def _go_back(self) -> None:
        """Leave parts or online mode, which were for another call. This call is captured if possible."""
        self.parts, self._runs_in_parts = None, False
        self._apart.clear()
        self._leave_online()
        if self.settings.arena:
            self.begin_anew()

    def _entry(self, sample: Sample, inputs: list[torch.Tensor], state: State, tree: Any) -> Entry | None:
        if self._runs_in_parts and not self.entries:  # no entry can exist
            return None
        return super()._entry(sample, inputs, state, tree)

    def _new_entry(
        self, key: Signature, sample: Sample, inputs: list[torch.Tensor], expected: Answers | None = None
    ) -> Entry | None:
        if self._runs_in_parts or key in self._apart or self._without_gradient[key] >= _MOST_WITHOUT_GRADIENT:
            return None
        try:
            entry = super()._new_entry(key, sample, inputs, expected)
            self._former = None
            return entry
        except NoGradientError:
            self._without_gradient[key] += 1
            raise
        except InfeasibleBudgetError as error:
            if not self.in_terms:
                raise
            self._waiting.leave_summed(error)
            self._leave_in_terms(False)
            return self._new_entry(key, sample, inputs, expected)
        except CaptureError as error:
            if expected is not None or isinstance(error, GradientRequiredError):
                raise
            self._run_apart(key, inputs, error, always=True)
            return None

    def _run_apart(self, key: Signature, inputs: list[torch.Tensor], error: CaptureError, always: bool) -> None:
        """Run such calls in parts or under ``lowtide.online``, as the settings say."""
        if self.settings.on_capture_error == "error":
            raise error
        if self.settings.on_capture_error == "online":
            assert self.settings.budget is not None
            self._go_online(str(error), parse_budget(self.settings.budget, None), device_of_inputs(inputs))
            return
        changes = isinstance(error, ManyProgramsError)
        if changes:
            self._instead.takes_over(self._granted(), self.recaptures.novelty.seconds, device_of_inputs(inputs))
        if changes and not can_run_in_parts(self.model):
            self._go_whole(str(error), inputs)
            return
        self.parts = self.parts or self._former or Parts(self.model, self.settings, error)
        self._was_whole = self.parts.shared.must_fit = changes
        self.parts.shared.budget.granted_bytes = max(self.parts.shared.budget.granted_bytes, self._granted())
        if self._arenas:  # arena and parts together would exceed the budget
            self.begin_anew()
        if always:
            self._apart.add(key)
            self._forget(key)

    def _arena(self, program: Program) -> Arena | None:
        return super()._arena(program) if self.parts is None else None

    def planned(self, captured: Captured, sample: Sample, finish: Finish, **known: Any) -> tuple[Program, Plan]:
        """Return the program to run and its plan. Raises ``CaptureError`` if only the copies of tensors that the
        forward pass writes into do not fit: parts need none."""
        if self._root is None:
            try:
                return super().planned(captured, sample, finish, **known)
            except InfeasibleBudgetError as error:
                missing, copies = error.minimum_bytes - error.budget_bytes, kept_bytes(captured.program)
                if missing > copies or not self._may_be_apart():
                    raise
                raise CaptureError(
                    f"its program keeps {copies} bytes of what the forward pass writes into, which do not fit: {error}"
                ) from None
        plan = functools.partial(super().planned, captured, sample, finish)
        return self._root.planned(plan, type(self.model).__name__, self.entries.clear)

    def _may_be_apart(self) -> bool:
        return self.settings.on_capture_error == "parts" and not self._stays_whole and can_run_in_parts(self.model)

    def _may_go_without(self, inputs: Sequence[torch.Tensor]) -> bool:
        return self._may_be_apart() or self._may_be_online(inputs)

    def _may_be_online(self, arguments: Any) -> bool:
        """Whether a call that can be captured may run under ``lowtide.online`` nevertheless."""
        decided = self._stays_whole or self._root is not None or self.optimizer is not None
        return not decided and self._instead.is_possible(arguments)

    def _go_whole(self, why: str | InfeasibleBudgetError, *arguments: Any) -> None:
        """Leave parts, which do not fit the budget or do not exist: run online if possible, or capture every call."""
        budget_bytes = self._instead.budget_bytes or (0 if isinstance(why, str) else why.budget_bytes)
        may_exceed = self._was_whole or isinstance(why, str)  # a plan would have let it run
        online = self._may_be_online(arguments)
        device = self._instead.device if self.parts is None else self.parts.device
        self.parts, self._runs_in_parts, self._was_whole, self._stays_whole = None, False, False, True
        self._apart.clear()
        if online:
            self.improving.stop()
            self._go_online(why, budget_bytes, device, may_exceed=may_exceed)
        else:
            _LOG.warning("%s is captured in every call: %s", type(self.model).__name__, why)

    def _wants_plan(self, online: OnlineCalls, arguments: Any) -> bool:
        """Whether to capture and plan this call of a model in online mode."""
        outgrown = self.parts is not None and self.parts.are_outgrown(arguments)
        self._online = self._instead.calls(online, type(self.model).__name__, self._granted(), outgrown)
        return self._online is None or self._instead.wants_plan(arguments)

    def _go_online(
        self, why: str | InfeasibleBudgetError, budget_bytes: int, device: torch.device, *, may_exceed: bool = False
    ) -> None:
        """Run both passes eagerly inside the budget from now on. ``may_exceed``: go above it if a step does not fit."""
        self._online = self._instead.begun(type(self.model).__name__, why, budget_bytes, device, may_exceed)

    def _run_online(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._online is not None and self._is_trained() and torch.is_grad_enabled():
            return self._online.run(self.original_forward, args, kwargs)
        return self.original_forward(*args, **kwargs)

    @property
    def is_online(self) -> bool:
        return self._online is not None

    def _leave_online(self) -> None:
        if self._online is not None:
            online, self._online = self._online, None
            online.leave()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the searches for better plans end, at most ``seconds``. Returns whether they have ended."""
        began = time.monotonic()
        ended = self.improving.wait(seconds)
        left = None if seconds is None else max(seconds - (time.monotonic() - began), 0.0)
        return (self.parts is None or self.parts.shared.finish(left)) and ended

    def plans(self) -> list[Plan]:
        """The plans made so far, for the model or for its parts."""
        planned = [self, *(self.parts.planned() if self.parts else ())]
        return [entry.plan for one in planned for entries in one.entries.values() for entry in entries]

    def end(self) -> None:
        """End the searches for better plans, and the online mode if lowtide began it."""
        super().end()
        if self.parts is not None:
            self.parts.backward.leave()
        if self._root is not None:
            self._root.end()
            self.given_forward = self._root.forward
        self._leave_online()

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        """Copy the model with it: the copy makes its own plans, under the same settings."""
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        model = memo.get(id(self.model))  # present if the model itself is being copied
        if model is None:
            model = copy.deepcopy(self.model, memo)
        function = getattr(self.original_forward, "__func__", None)
        forward = self.original_forward if function is None else function.__get__(model)
        clone._begin(model, self.settings, forward, self.had_instance_forward)
        return clone

    def __reduce__(self) -> Any:
        """Pickle the model and its settings, without ``most_bytes``, which is this machine's. Plans are made anew."""
        original = self.original_forward if self.had_instance_forward else None
        return _restore_pickled, (self.model, dataclasses.replace(self.settings, most_bytes=None), original)


def _restore_pickled(model: nn.Module, settings: Settings, original: Callable[..., Any] | None) -> Rematerialized:
    if original is not None:
        model.forward = original
    return Rematerialized(model, settings)
