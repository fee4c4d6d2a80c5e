"""The model swap: a planned ``forward`` in place of the model's own, one plan per input signature."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.capture import Program, attributes, structure
from lowtide.capture.capture import flat_arguments
from lowtide.capture.module import GradientMask, model_state
from lowtide.dynamic.context import online
from lowtide.errors import CaptureError, ExecutionError, PlanError
from lowtide.lower import Lowered, lower
from lowtide.pipeline import Settings, planned_program
from lowtide.planning import Plan
from lowtide.runtime.signature import Signature, describe, signature
from lowtide.runtime.step import run
from lowtide.stages import itemised, stage, stage_seconds

_LOG = logging.getLogger(__name__)
_MANY_PROGRAMS = 8  # for the same shapes: said in the log
_MOST_PROGRAMS = 32  # kept


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A planned program, ready to run; ``settings``: those of the model when it was planned."""

    program: Program
    plan: Plan
    lowered: Lowered
    remake: Callable[[GradientMask], Entry]
    settings: attributes.Settings

    def for_mask(self, mask: GradientMask) -> Entry:
        """The same program for a gradient of other results; it serves the following calls too."""
        return self.remake(mask)


class Rematerialized:
    """The planned ``forward`` of one model. Calls under ``torch.no_grad()`` or in evaluation mode run the original."""

    _lowtide_runtime = True

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = weakref.ref(model)
        self.settings = settings
        self.entries: dict[Signature, list[Entry]] = {}
        self.spare: dict[Signature, list[Entry]] = {}
        self.had_instance_forward = "forward" in model.__dict__
        self.original_forward = model.forward
        self._warned = self._warned_of_answers = self._warned_of_settings = False
        self._online: online | None = None
        self.latest: Entry | None = None  # what the last planned call ran
        functools.update_wrapper(self, self.original_forward, updated=())

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
        inputs, arguments = self.flat_inputs(args, kwargs)
        if not any(tensor.requires_grad for tensor in inputs):
            return self.original_forward(*args, **kwargs)
        entry = self.entry(args, kwargs, inputs, arguments)
        if entry is None:
            return self.original_forward(*args, **kwargs)
        return _rebuild(entry.program, self.run(entry, inputs), inputs, model)

    def run(self, entry: Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward outputs of the planned program."""
        self.latest = entry
        return run(entry, inputs)

    def flat_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Any]:
        tensors, arguments = flat_arguments(args, kwargs)
        return [*model_state(self.model).tensors, *tensors], arguments

    def entry(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], inputs: list[torch.Tensor], arguments: Any
    ) -> Entry | None:
        """The planned program for this call, made now if it is new; ``None`` where eager was asked for."""
        key = signature(list(self.model.modules()), inputs, arguments)
        memo: dict[int, Any] = {}
        for entry in self.entries.get(key, ()):
            if all(question.holds(inputs, memo) for question in entry.program.questions):
                self._notice_changed_settings(entry)
                return entry
        if self.entries and self.settings.on_new_signature != "plan":
            self._refuse(inputs)
            return None
        try:
            return self._make(key, args, kwargs, None)
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

    def leave_online(self) -> None:
        """End the online mode, where a capture error began it."""
        if self._online is not None:
            context, self._online = self._online, None
            context.__exit__(None, None, None)

    def _make(
        self,
        key: Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mask: GradientMask | None,
        assigned: tuple[attributes.Place, ...] | None = None,
    ) -> Entry:
        with stage_seconds() as taken:
            program, plan = self.planned(args, kwargs, mask, assigned)
            with stage("lowering"):
                lowered = lower(program, plan.schedule)
        # Shapes suffice to capture again for other gradients, but values answer the questions: keep the small ones.
        autocast = _autocast(program)
        remake = functools.partial(self._remake, key, program, _without_storage(args, kwargs), autocast)
        entry = Entry(program, plan, lowered, remake, attributes.settings(self.model))
        entries = self.entries.setdefault(key, [])
        entries.append(entry)
        self._notice_changing_answers(entries)
        _LOG.info(
            "planned %s: peak %d bytes of %d (%s)",
            type(self.model).__name__, plan.peak_bytes, plan.budget_bytes, itemised(taken),
        )  # fmt: skip
        return entry

    def _notice_changed_settings(self, entry: Entry) -> None:
        """Say once that the model was changed after it was planned, in a way that planned calls do not follow."""
        if self._warned_of_settings or (now := attributes.settings(self.model)) == entry.settings:
            return
        self._warned_of_settings = True
        _LOG.warning(
            "%s was changed after it was planned (%s): planned calls go on with what was there then. Where the program depends "
            "on it, call lowtide.restore(model) and rematerialize again, or keep it in a buffer, which is followed.",
            type(self.model).__name__, attributes.changed_settings(self.model, entry.settings, now),
        )  # fmt: skip

    def _notice_changing_answers(self, entries: list[Entry]) -> None:
        """Say once that the model asks something whose answer is another in every call; keep the latest programs."""
        del entries[:-_MOST_PROGRAMS]
        if len(entries) != _MANY_PROGRAMS or self._warned_of_answers:
            return
        self._warned_of_answers = True
        pairs = zip(entries[-2].program.questions, entries[-1].program.questions, strict=False)
        changed = (
            f" ({new.source}: {old.answer}, then {new.answer})" for old, new in pairs if old.answer != new.answer
        )
        _LOG.warning(
            "%s has been planned %d times for the same shapes: its program depends on a number that changes from call to "
            "call%s, and every new one takes a plan of its own. Make it constant, or run the model under lowtide.online.",
            type(self.model).__name__, len(entries), next(changed, ""),
        )  # fmt: skip

    def planned(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        mask: GradientMask | None,
        assigned: tuple[attributes.Place, ...] | None,
    ) -> tuple[Program, Plan]:
        """The program of a call, and its plan."""
        granted = max((e.plan.budget_bytes for entries in self.entries.values() for e in entries), default=0)
        return planned_program(self.model, args, kwargs, self.settings, mask, assigned, granted)

    def _remake(
        self, key: Signature, old: Program, sample: tuple[Any, Any], autocast: torch.autocast, mask: GradientMask
    ) -> Entry:
        """An entry for gradients that arrive differently; it takes the place of ``old``, which is kept in case they
        alternate."""
        known, spare = self.entries[key], self.spare.setdefault(key, [])
        wanted = (mask, old.answers)
        entry = next((e for e in spare if (e.program.mask, e.program.answers) == wanted), None)
        if entry is None:
            with torch.enable_grad(), autocast:
                entry = self._make(key, *sample, mask, old.assigned)
        spare.extend(e for e in known if e.program is old)
        spare[:] = [e for e in spare if e is not entry]
        known[:] = [entry, *(e for e in known if e is not entry and e.program is not old)]
        return entry

    def _refuse(self, inputs: Sequence[torch.Tensor]) -> None:
        states = len(model_state(self.model).tensors)
        what = f"a call with {describe(inputs, states)} has another signature than the planned ones"
        if self.settings.on_new_signature == "error":
            raise PlanError(f'{what}; call with the planned shapes, or pass on_new_signature="plan" (or "eager").')
        if not self._warned:
            self._warned = True
            warnings.warn(f"{what}; it runs without a plan, outside the budget.", stacklevel=4)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        """The copy of the model plans for itself, under the same settings."""
        clone = object.__new__(type(self))
        memo[id(self)] = clone
        model = memo.get(id(self.model))  # under construction where the model itself is being copied
        clone._reset(copy.deepcopy(self.model, memo) if model is None else model, self)
        return clone

    def _reset(self, model: nn.Module, other: Rematerialized) -> None:
        self._model = weakref.ref(model)
        self.settings = other.settings
        self.entries = {}
        self.spare = {}
        self.had_instance_forward = other.had_instance_forward
        self._warned = self._warned_of_answers = self._warned_of_settings = False
        self._online = None
        self.latest = None
        forward = other.original_forward
        self.original_forward = getattr(forward, "__func__", forward)
        if hasattr(forward, "__func__"):
            self.original_forward = forward.__func__.__get__(model)
        functools.update_wrapper(self, self.original_forward, updated=())

    def __reduce__(self) -> Any:
        """Pickled with the model: settings travel, plans are made anew."""
        original = self.original_forward if self.had_instance_forward else None
        return _restore_pickled, (self.model, self.settings, original)


def _restore_pickled(model: nn.Module, settings: Settings, original: Callable[..., Any] | None) -> Rematerialized:
    if original is not None:
        model.forward = original
    return Rematerialized(model, settings)


def _rebuild(program: Program, outputs: list[torch.Tensor], inputs: list[torch.Tensor], model: nn.Module) -> Any:
    """The model's result, of the type that eager returns; what eager leaves in attributes is there too."""
    tensors = []
    for result in program.results:
        source = (
            inputs[result.argument]
            if result.argument is not None
            else outputs[result.returned if result.returned is not None else result.base or 0]
        )
        tensors.append(source if result.view is None else source.as_strided(*result.view))
    for name, index in program.reassigned.items():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = tensors[index].detach()
    result, left = structure.unflatten(program.result_structure, tensors)
    attributes.write(model, program.assigned, left)
    return result


def _autocast(program: Program) -> torch.autocast:
    """The autocast state of now, to be entered again."""
    device_type = program.metas[0].device.type
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype=dtype if enabled else None, enabled=enabled)


def _without_storage(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The call with floating tensors replaced by ones without memory."""
    tensors, tree = flat_arguments(args, kwargs)
    light = [_light(tensor) for tensor in tensors]
    result: tuple[Any, Any] = structure.unflatten(tree, light)
    return result


def _light(tensor: torch.Tensor) -> torch.Tensor:
    """Integers as they are, since they answer questions; a floating tensor of the same layout without memory."""
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.detach().clone()
    hollow = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    hollow.untyped_storage().resize_(0)
    return hollow.requires_grad_(tensor.requires_grad)
