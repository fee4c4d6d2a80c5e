"""Entries: what a plan is made for (a signature, a sample call) and the planned program that runs."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from lowtide.capture import Captured
from lowtide.capture.arguments import flat_arguments, rebuilt
from lowtide.capture.contract import Conditions
from lowtide.capture.model_state import model_state
from lowtide.capture.python_state.effects import attribute_effects
from lowtide.capture.python_state.guards.reads import Read
from lowtide.capture.python_state.paths import named
from lowtide.capture.trace.autocast import is_kept
from lowtide.errors import ExecutionError, PlanError
from lowtide.ir import Schedule, simulate
from lowtide.lower import Addresses, Lowered, lower
from lowtide.memory.arena import Arena
from lowtide.objects import structure, ways
from lowtide.objects.held import Held
from lowtide.objects.keys import fingerprint, tensor_keys
from lowtide.objects.structure import Changing, Way
from lowtide.offload import open_memory, room_for
from lowtide.planning import Plan
from lowtide.program import Program, layouts
from lowtide.program.distributed.local import like_form, specs_of
from lowtide.program.results import GradientMask
from lowtide.program.sizes import device_of_inputs, program_device
from lowtide.runtime.programs.modes import fixed_modes, modes_as, modes_of
from lowtide.runtime.updates.optimizer import UpdatingOptimizer
from lowtide.settings import Settings
from lowtide.sharing import Member
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
Signature = tuple[Any, ...]
_MOST_SCHEDULES = 8  # kept for siblings
_GAIN = 0.005  # least share of step time saved to take over a sibling's schedule
Names = tuple[tuple[str, ...], ...]


def signature(modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor], names: Names, tree: Any) -> Signature:
    """The key of calls that one program may serve: names of the model's tensors, structure and plain values of the call
    (``tree``), layout and distribution of every flat input, flags of the modules, autocast and other modes. Raises
    ``PlanError`` for a call on the meta device."""
    device_type, specs = device_of_inputs(inputs).type, specs_of(inputs)
    if device_type == "meta":
        raise PlanError(
            "a model on the meta device can be planned (lowtide.plan) but not run; move it to a device first."
        )
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    return (
        names,
        fingerprint(tree),
        tensor_keys(inputs),
        modes_of(modules),
        fixed_modes(),
        any(module.__dict__.get("gradient_checkpointing") for module in modules),
        autocast and (autocast, torch.is_autocast_cache_enabled(), *map(is_kept, inputs)),
        tuple(map(type, inputs)),
        _attributes(inputs[: len(names)], specs),
        specs,
    )


def _attributes(tensors: Sequence[torch.Tensor], specs: Sequence[Any]) -> tuple[Any, ...]:
    """Python attributes set on tensors that are not distributed; empty if no tensor has any."""
    found = [*map(vars, tensors)]
    if not any(found):
        return ()
    pairs = itertools.zip_longest(found, specs[: len(found)])
    return tuple(fingerprint(dict(own)) if spec is None else None for own, spec in pairs)


def describe(inputs: Sequence[torch.Tensor], states: int) -> str:
    """Data types and shapes of the call's tensors as a short text, for messages."""
    tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs[states:]]
    return ", ".join(tensors) or "no tensors"


class Sample(NamedTuple):
    """A call as it was given. ``changing``: stand-ins for values in it that differ in every call (``objects.ways``)."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    changing: Mapping[Way, Changing] = MappingProxyType({})

    def standing(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments with the stand-ins in place of these values, in copies of their containers."""
        if not self.changing:
            return self.args, self.kwargs
        tensors, arguments = structure.flatten((tuple(self.args), dict(self.kwargs)))
        args, kwargs = structure.unflatten(ways.with_values(arguments, self.changing), tensors)
        return args, kwargs


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # printing a tensor without memory crashes
class KeptSample:
    """A call kept to be captured again for other gradients, with its ``autocast`` state. Floating ``tensors`` keep only
    their shape; integers keep their values, because code may ask for them. ``given``: a fingerprint of the plain
    values; ``held``: the content of objects among the arguments; ``values``: the call's values where each call has
    others."""

    tensors: Sequence[torch.Tensor]
    arguments: Any
    given: Any
    held: Held
    autocast: contextlib.AbstractContextManager[Any]
    values: Sequence[Any] = ()

    @staticmethod
    def of(sample: Sample, model: nn.Module, device_type: str) -> KeptSample:
        tensors, arguments = flat_arguments(*sample.standing(), model_state(model).tensors)
        hollow = [like_form(each, _without_data(each)) for each in tensors]
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        keep_casts = torch.is_autocast_cache_enabled()
        autocast = torch.autocast(device_type, dtype if enabled else None, enabled, cache_enabled=keep_casts)
        values = [one.value for one in structure.changing(arguments)]
        held = Held(structure.objects(arguments))
        return KeptSample(hollow, arguments, fingerprint(arguments), held, autocast, values)

    def on(self, model: nn.Module) -> Sample:
        """The call, with the model's current parameters and buffers where they are arguments."""
        return Sample(*rebuilt(self.arguments, model_state(model).registered, self.tensors))

    @contextlib.contextmanager
    def with_values(self) -> Iterator[None]:
        """A context in which the stand-ins have the values of this call."""
        standing = structure.changing(self.arguments)
        now = [dict(one.values) for one in standing]
        for one, value in zip(standing, self.values, strict=True):
            one.values[one.way] = value
        try:
            yield
        finally:
            for one, values in zip(standing, now, strict=True):
                one.values.update(values)

    @property
    def is_as_given(self) -> bool:
        """Whether objects among the arguments are unchanged since the call was kept."""
        return bool(fingerprint(self.arguments) == self.given)


@dataclass(slots=True, eq=False)
class Entry:
    """A planned program for calls with signature ``key`` on which one of ``conditions`` holds (last used first).

    - ``captured``: the program without compiled kernels; ``sample``: the call it was captured with.
    - ``for_masks``: entries for the same calls with other incoming gradients. They share this mapping, the conditions
      and ``captured_for``, which is what was captured for each and survives new plans.
    - ``before``: attributes of the model as the latest call found them. ``read_again``: see ``programs.changing``, once
      known.
    - ``plan`` and ``lowered`` change when a better plan is found. ``version``: the version of ``siblings`` already
      considered.
    - ``used``: number of the latest call, counting all calls; ``calls``: number of own calls; ``made``: when, in
      seconds.
    - ``arena``: the block its tensors lie in, if any. ``most_bytes``: that of the settings it was planned with.
    - ``kin``: the ``Kin`` of its calls (see ``programs.kin``) and the shapes of their tensors.
    """

    key: Signature
    captured: Captured
    plan: Plan
    lowered: Lowered
    conditions: list[Conditions]
    sample: KeptSample
    for_masks: dict[GradientMask, Entry]
    captured_for: dict[GradientMask, Captured] = field(default_factory=dict)
    before: list[attribute_effects.Before] = field(default_factory=list)
    siblings: Siblings | None = None
    version: int = 0
    used: int = 0
    calls: int = 0
    made: float = field(default_factory=time.monotonic)
    arena: Arena | None = None
    most_bytes: int | None = None
    read_again: tuple[int, ...] | None = None
    kin: tuple[Any, Any] = (None, None)

    @contextlib.contextmanager
    def call_as_it_was(self, model: nn.Module) -> Iterator[None]:
        """A context that restores the modes of the forward pass and the content of objects among the arguments: code
        may have changed them since. Raises ``ExecutionError`` if anything else that the program depends on has
        changed."""
        modules, (_, _, _, modes, fixed, *_) = [*model.modules()], self.key
        changed = "hooks of all modules" if fixed != fixed_modes() else ""
        changed = changed or ("" if len(modules) == len(modes[0]) else "submodules have come or gone")
        if changed:
            raise _changed_before_backward(model, changed)
        with self.sample.held.put_back():
            if not self.sample.is_as_given:
                raise _changed_before_backward(model, "an object among its arguments")
            with modes_as(modules, modes), self.sample.autocast, torch.enable_grad(), self.sample.with_values():
                changed = self.conditions[0].changed(model)
                if changed:
                    raise _changed_before_backward(model, changed)
                yield

    def with_its_numbers(self, captured: Captured, model: nn.Module) -> Captured:
        """Return ``captured``, a new capture of this entry's call. Raises ``ExecutionError`` if a number that was an
        input of the program is a constant now."""
        if captured.contract.numbers != self.captured.contract.numbers:
            names = [one.text if isinstance(one, Read) else "a drawn number" for one in self.captured.contract.scalars]
            raise _changed_before_backward(model, f"{named(names)}, which it computes with")
        return captured

    @property
    def program(self) -> Program:
        return self.lowered.program

    @property
    def states(self) -> int:
        """How many of the flat inputs belong to the model."""
        return len(self.key[0])

    def goes(self, expected: Sequence[bool | None], modules: Sequence[nn.Module], inputs: list[torch.Tensor]) -> bool:
        """Whether it is for a call whose first checks of values go as ``expected`` says."""
        goes = self.captured.contract.conditions.go(expected)
        return goes and any(one.hold(modules, inputs, {}) for one in self.conditions)


class Owner(Protocol):
    """What entries need of the ``programs.Programs`` that own them. ``settings``: used for each new plan.
    ``shares_budget``: the budget is shared with other programs, so it cannot be lowered for these alone."""

    settings: Settings
    entries: dict[Signature, list[Entry]]
    optimizer: UpdatingOptimizer | None
    shares_budget: bool

    @property
    def model(self) -> nn.Module: ...
    def plan_anew(self) -> None: ...
    def begin_anew(self) -> None: ...
    def improve(self, entry: Entry) -> None: ...


def new_call(model: nn.Module, inputs: list[torch.Tensor], states: int, known: Entry | None) -> str:
    """A message: there is no plan for a call with these inputs. ``known``: an entry with the same signature."""
    what = f"a call with {describe(inputs, states)} has another"
    if known is None:
        return f"{what} signature than the planned ones"
    return f"{what} program than the planned ones ({known.conditions[0].broken(model, inputs)})"


def _changed_before_backward(model: nn.Module, changed: str) -> ExecutionError:
    return ExecutionError(
        f"{type(model).__name__} was changed between a forward pass and its backward pass, which needs a program of its own "
        f"({changed}). Change it after the backward pass."
    )


def with_plan(entry: Entry, plan: Plan | None) -> Entry:
    """A copy of the entry with ``plan``, or the entry itself if ``plan`` is ``None``."""
    return replace(entry, plan=plan, lowered=lowered(entry.program, plan, entry.arena)) if plan else entry


def exchange(known: Mapping[Signature, list[Entry]], exchanged: Mapping[Entry, Entry]) -> None:
    """Replace entries of a model by others for the same calls."""
    for entries in known.values():
        entries[:] = [exchanged.get(entry, entry) for entry in entries]
        for entry in entries:
            entry.for_masks.clear()
            entry.for_masks[entry.program.mask] = entry


class Siblings:
    """Schedules of programs with the same operators at other sizes: each is valid for all of them. ``version`` counts
    additions."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        self.version = 0

    def keep(self, entry: Entry) -> None:
        """Add ``entry`` to the siblings and offer its schedule to the others."""
        entry.siblings = self
        if entry.plan.schedule not in self.schedules:
            self.schedules = [*self.schedules, entry.plan.schedule][-_MOST_SCHEDULES:]
            self.version += 1
        entry.version = self.version

    def take_over(self, entry: Entry, *, waits: bool) -> None:
        """Give ``entry`` a sibling's schedule that is quicker and fits. ``waits``: other programs run between its two
        passes, so the new schedule may not hold more bytes there than the present one."""
        entry.version, plan = self.version, entry.plan
        member = Member(entry.program, plan.costs)
        saved = member.footprint(plan.schedule).saved_bytes if waits else 0
        for schedule in self.schedules:
            if schedule.moves and plan.costs.second_memory is None:  # planned without transfers, since everything fits
                continue
            run = simulate(plan.graph, plan.costs, schedule)
            if run.peak_bytes > plan.budget_bytes or run.time_ns >= (1 - _GAIN) * plan.time_ns:
                continue
            if not waits or member.footprint(schedule).saved_bytes <= saved:
                found = plan.with_schedule(schedule, run)
                plan = found if entry.arena is None or found.is_placed else plan
        if plan is not entry.plan:
            entry.plan, entry.lowered = plan, lowered(entry.program, plan, entry.arena)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its memory, unless code may ask for its values (integers, single numbers) or it is sparse,
    conjugated or negated."""
    if tensor.layout is not torch.strided:
        return tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach().requires_grad_(tensor.requires_grad)
    if tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return layouts.copied(tensor).requires_grad_(tensor.requires_grad)
    hollow = layouts.without_memory(tensor)
    return hollow if tensor.is_leaf else torch.ops.aten.alias.default(hollow)


def lowered(program: Program, plan: Plan, arena: Arena | None) -> Lowered:
    """Lower ``program`` by the schedule of ``plan``, with ``arena`` if given. If the addresses exceed the budget, log a
    warning and do without the arena."""
    memory, beside, device = plan.costs.second_memory, plan.costs.collectives_beside, program_device(program)
    if plan.schedule.moves and memory is not None:
        opened = functools.partial(open_memory, memory.name, device)
        return lower(program, plan.schedule, room=room_for(plan.schedule, plan.costs, opened), beside=beside)
    if arena is None:
        return lower(program, plan.schedule, beside=beside)
    layout = plan.layout
    if layout.reserved_bytes > plan.budget_bytes:
        _LOG.warning(
            "its addresses take up %d bytes (%s), more than the budget of %d: it runs without an arena",
            layout.reserved_bytes, format_bytes(layout.reserved_bytes), plan.budget_bytes,
        )  # fmt: skip
        return lower(program, plan.schedule, beside=beside)
    return lower(program, plan.schedule, Addresses.of(layout, arena, device), beside=beside)
