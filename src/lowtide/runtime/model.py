"""The model swap: a planned ``forward`` in place of the model's own, one plan per input signature."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.modules import module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.capture.capture import flat_arguments
from lowtide.capture.contract import Captured
from lowtide.capture.copies import model_state
from lowtide.capture.python_state import attribute_effects, buffer_effects
from lowtide.capture.python_state.held_inputs import held_tensors
from lowtide.capture.python_state.paths import AttributePath
from lowtide.dynamic.context import is_inside, online
from lowtide.errors import CaptureError, ExecutionError, PlanError
from lowtide.lower import lower
from lowtide.pipeline import Settings, captured_program, plan_request, planned_program
from lowtide.planning import Plan
from lowtide.program import Program, structure
from lowtide.program.results import GradientMask
from lowtide.runtime.checked import is_due, require_same
from lowtide.runtime.entry import Entry, Names, Sample, Signature, describe, signature
from lowtide.runtime.improving import Improving
from lowtide.runtime.step import run
from lowtide.stage_times import itemised, stage, stage_seconds

_LOG = logging.getLogger(__name__)
_TRACED = (FakeTensor, FunctionalTensor)
_MANY_CAPTURES = 8  # for the same shapes: said in the log
_MOST_PROGRAMS = 32  # kept
_MOST_CONDITIONS = 16  # kept, of each


class Rematerialized:
    """The planned ``forward`` of one model. Calls under ``torch.no_grad()`` or in evaluation mode run the original."""

    _lowtide_runtime = True

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._begin(model, settings, model.forward, "forward" in model.__dict__)

    def _begin(
        self, model: nn.Module, settings: Settings, original_forward: Callable[..., Any], had_instance_forward: bool
    ) -> None:
        """Nothing is planned yet."""
        self._model = weakref.ref(model)
        self.settings = settings
        self.original_forward = original_forward
        self.had_instance_forward = had_instance_forward
        functools.update_wrapper(self, original_forward, updated=())
        self.entries: dict[Signature, list[Entry]] = {}
        self._captures: Counter[Signature] = Counter()
        self._follow: set[AttributePath] = set()  # attributes whose tensors were seen to change
        self._warned = False
        self._said_transformed = False
        self._online: online | None = None
        self.improving = Improving(type(model).__name__)
        self.latest: Entry | None = None  # what the last planned call ran

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ExecutionError("the rematerialized model no longer exists; keep a reference to it.")
        return model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if args and args[0] is model:  # made a method of the model, as accelerate does when it takes its wrappers off
            model.forward, args = self, args[1:]
        if (
            self._online is not None
            or not model.training
            or not torch.is_grad_enabled()
            or torch.compiler.is_compiling()
        ):
            return self.original_forward(*args, **kwargs)
        if _is_transformed():
            if not self._said_transformed:
                self._said_transformed = True
                _LOG.warning(
                    "%s runs without a plan, outside the budget, under torch.func, forward-mode derivatives, torch.jit.trace, "
                    "modes (TorchDispatchMode, TorchFunctionMode), hooks of saved tensors, or backward hooks of all modules",
                    type(model).__name__,
                )
            return self.original_forward(*args, **kwargs)
        inputs, names, tree = self._flat(args, kwargs)
        as_part = any(isinstance(tensor, _TRACED) for tensor in inputs)  # of a larger model that is captured
        if as_part or not any(tensor.requires_grad for tensor in inputs):
            return self.original_forward(*args, **kwargs)
        entry = self._entry(Sample(args, kwargs), inputs, names, tree)
        if entry is None:
            return self.original_forward(*args, **kwargs)
        contract, draws = entry.captured.contract, entry.conditions[0].draws
        if is_due():
            self._check(entry, Sample(args, kwargs))
        inputs = contract.flat_inputs(model, inputs) or inputs
        if draws is not None:
            draws.take()
        outputs = self.run(entry, inputs)
        tensors = [result.form(outputs, inputs) for result in entry.program.results]
        result, entry.before[:] = contract.fulfil(model, tensors, structure.objects(tree))
        return result

    def prepare(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan for calls like this one now."""
        with torch.enable_grad():
            self._entry(Sample(args, kwargs), *self._flat(args, kwargs))

    def _check(self, entry: Entry, sample: Sample) -> None:
        """Capture the call that ``entry`` is about to run for anew, and compare."""
        planned = entry.captured
        try:
            captured = self._capture(sample, planned.program.mask, follow=planned.contract.held_inputs.attributes())
        except CaptureError as error:
            raise ExecutionError(
                f"{type(self.model).__name__} was planned, but cannot be captured now: {error}"
            ) from error
        require_same(captured, planned, {id(tensor) for tensor in held_tensors(self.model)}, self.model)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward outputs of the planned program."""
        self.latest = entry
        return run(entry.lowered, inputs, lambda mask: self.entry_for(mask, entry).lowered)

    def _flat(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Names, Any]:
        """Parameters, buffers and the call's tensors; the names of the model's, and the structure of the call's arguments."""
        tensors, tree = flat_arguments(args, kwargs)
        state = model_state(self.model)
        return [*state.tensors, *tensors], state.names, tree

    def _entry(self, sample: Sample, inputs: list[torch.Tensor], names: Names, tree: Any) -> Entry | None:
        """The planned program for this call, made now if it is new; ``None`` where eager was asked for, or the
        online mode is there."""
        modules = list(self.model.modules())
        key = signature(modules, inputs, names, tree)
        self.improving.exchange()
        memo: dict[int, Any] = {}
        for entry in self.entries.get(key, ()):
            for index, conditions in enumerate(entry.conditions):
                if conditions.hold(modules, inputs, memo):
                    entry.conditions.insert(0, entry.conditions.pop(index))
                    return entry
        if is_inside():
            _LOG.info("%s is not planned inside lowtide.online: it runs within that budget", type(self.model).__name__)
            return None
        if self.entries and self.settings.on_new_signature != "plan":
            self._refuse(key, inputs)
            return None
        self._notice_changes(key, inputs)
        try:
            return self._make(key, sample)
        except CaptureError as error:
            if self.settings.on_capture_error != "online":
                raise
            self._go_online(error)
            return None

    def _go_online(self, error: CaptureError) -> None:
        """Run eagerly inside the budget from now on: forward and backward passes, and whatever this thread does else."""
        if self.settings.budget is None:
            raise error
        _LOG.warning(
            "%s cannot be captured, so it runs under lowtide.online within %s: %s",
            type(self.model).__name__, self.settings.budget, error,
        )  # fmt: skip
        self._online = online(self.settings.budget)
        self._online.__enter__()

    def end(self) -> None:
        """End the searches for better plans, and the online mode, where a capture error began it."""
        self.improving.stop()
        if self._online is not None:
            context, self._online = self._online, None
            context.__exit__(None, None, None)

    def _make(
        self, key: Signature, sample: Sample, old: Entry | None = None, mask: GradientMask | None = None
    ) -> Entry:
        """An entry for a call like ``sample``: a known one, where the program is the same. ``old``: one for the same call whose
        gradients arrive otherwise."""
        known = self.entries.get(key, [])
        with stage_seconds() as taken:
            if old is None:
                captured = self._captured(sample, known[0].captured.program.mask if known else None)
                held = {id(tensor) for tensor in held_tensors(self.model)}
                same = next((entry for entry in known if captured.same_as(entry.captured, held)), None)
                if same is not None:
                    same.conditions.insert(0, captured.contract.conditions)
                    del same.conditions[_MOST_CONDITIONS:]
                    return same
            else:
                captured = self._capture(sample, mask, like=old.captured)
            program, plan = self.planned(captured, sample)
            with stage("lowering"):
                lowered = lower(program, plan.schedule)
        conditions, for_masks = ([captured.contract.conditions], {}) if old is None else (old.conditions, old.for_masks)
        kept = sample.without_data(program.metas[0].device.type)
        entry = Entry(key, captured, plan, lowered, conditions, kept, for_masks)
        self.entries[key] = [*known, entry][-_MOST_PROGRAMS:]
        if self.settings.planning == "background" and plan.history and plan.overhead > 0:
            self.improving.add(entry, plan_request(program, plan.costs, plan.budget_bytes, self.settings))
        _LOG.info(
            "planned %s: peak %d bytes of %d (%s)",
            type(self.model).__name__, plan.peak_bytes, plan.budget_bytes, itemised(taken),
        )  # fmt: skip
        return entry

    def _captured(self, sample: Sample, mask: GradientMask | None) -> Captured:
        try:
            return self._capture(sample, mask, follow=frozenset(self._follow))
        except CaptureError:  # as constants their values are known
            if not self._follow:
                raise
            self._follow.clear()
            return self._capture(sample, mask)

    def _capture(self, sample: Sample, mask: GradientMask | None, **known: Any) -> Captured:
        return captured_program(self.model, sample.args, sample.kwargs, self.settings, mask, **known)

    def _notice_changes(self, key: Signature, inputs: list[torch.Tensor]) -> None:
        """Log why no program that is known for these shapes holds; once louder, where that is so again and again."""
        if not self.entries.get(key):
            return
        self._captures[key] += 1
        times = self._captures[key] + 1
        conditions = self._latest(key).conditions[0]
        why = conditions.broken(self.model, inputs)
        self._follow |= conditions.other_tensors(self.model)
        _LOG.info("%s is captured again: %s", type(self.model).__name__, why)
        if times == _MANY_CAPTURES:
            _LOG.warning(
                "%s has been captured %d times for the same shapes: its program depends on what changes from call to call "
                "(%s). Each time takes a capture, and a plan where the program is another one. Make it constant, keep it in a "
                "buffer, pass it as a tensor that is only computed with, or run the model under lowtide.online.",
                type(self.model).__name__, times, why,
            )  # fmt: skip

    def _latest(self, key: Signature) -> Entry:
        """The program for these shapes that ran last, if one did."""
        known = self.entries[key]
        return self.latest if self.latest is not None and self.latest in known else known[-1]

    def planned(self, captured: Captured, sample: Sample) -> tuple[Program, Plan]:
        """What is to run, and its plan."""
        granted = max((e.plan.budget_bytes for entries in self.entries.values() for e in entries), default=0)
        return planned_program(captured, self.model, sample.args, sample.kwargs, self.settings, granted)

    def entry_for(self, mask: GradientMask, old: Entry) -> Entry:
        """An entry for gradients that arrive otherwise; it takes the place of ``old``, which is kept in case they alternate."""
        if old in self.entries[old.key]:
            old.for_masks[old.program.mask] = old
        entry = old.for_masks.get(mask)
        if entry is None:
            with (
                attribute_effects.undone(self.model, old.before),
                buffer_effects.not_made(self.model, old.captured.contract.buffers),
                torch.enable_grad(),
                old.sample.autocast,
            ):
                changed = old.conditions[0].changed(self.model)
                if changed:
                    raise ExecutionError(
                        f"{type(self.model).__name__} was changed between a forward pass and its backward pass, which needs a "
                        f"program of its own ({changed}). Change it after the backward pass."
                    )
                entry = old.for_masks[mask] = self._make(old.key, old.sample, old, mask)
        others = (one for one in self.entries[old.key] if one is not entry and one is not old)
        self.entries[old.key] = [entry, *others]
        return entry

    def _refuse(self, key: Signature, inputs: list[torch.Tensor]) -> None:
        what = f"a call with {describe(inputs, len(model_state(self.model).tensors))} "
        if self.entries.get(key):
            what += f"has another program than the planned ones ({self._latest(key).conditions[0].broken(self.model, inputs)})"
        else:
            what += "has another signature than the planned ones"
        if self.settings.on_new_signature == "error":
            raise PlanError(f'{what}; call with the planned shapes, or pass on_new_signature="plan" (or "eager").')
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}; it runs without a plan, outside the budget.", stacklevel=4)

    @property
    def __code__(self) -> Any:
        """Of the model's own forward: torch.export reads its arguments' names there."""
        return self.original_forward.__code__

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        """The copy of the model plans for itself, under the same settings."""
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        model = memo.get(id(self.model))  # under construction where the model itself is being copied
        if model is None:
            model = copy.deepcopy(self.model, memo)
        function = getattr(self.original_forward, "__func__", None)
        forward = self.original_forward if function is None else function.__get__(model)
        clone._begin(model, self.settings, forward, self.had_instance_forward)
        return clone

    def __reduce__(self) -> Any:
        """Pickled with the model: settings travel, plans are made anew."""
        original = self.original_forward if self.had_instance_forward else None
        return _restore_pickled, (self.model, self.settings, original)


def _restore_pickled(model: nn.Module, settings: Settings, original: Callable[..., Any] | None) -> Rematerialized:
    if original is not None:
        model.forward = original
    return Rematerialized(model, settings)


def _is_transformed() -> bool:
    """Whether something follows each operator that autograd does not know of: what a plan runs would be missing there."""
    stacks: list[Callable[[], Any]] = [_get_current_function_mode_stack, _get_current_dispatch_mode_stack]
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or bool(module._global_backward_hooks or module._global_backward_pre_hooks)
        or any(_is_foreign(type(mode)) for stack in stacks for mode in stack())
        or any(map(_is_foreign, hooks or ()))
    )


def _is_foreign(value: Any) -> bool:
    """Whether a mode or a hook is neither of this project, nor one that plans run under."""
    return not str(getattr(value, "__module__", "")).startswith(
        ("lowtide.", "torch.utils._device", "torch.utils.checkpoint")
    )
