"""What a plan is made for and runs: a signature of calls, a sample of them, and the planned program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as _hooked

from lowtide.capture import Captured
from lowtide.capture.capture import flat_arguments
from lowtide.capture.contract import Conditions
from lowtide.capture.python_state import attribute_effects
from lowtide.capture.trace.autocast import is_kept
from lowtide.ir import Schedule, simulate
from lowtide.lower import Lowered
from lowtide.memory.arena import Arena
from lowtide.planning import Plan
from lowtide.program import Program, layouts, structure
from lowtide.program.keys import fingerprint, tensor_key
from lowtide.program.local import like_form, spec_of
from lowtide.program.results import GradientMask
from lowtide.program.sizes import device_of_inputs
from lowtide.runtime.placed import lowered

Signature = tuple[Any, ...]
_MOST_SCHEDULES = 8  # that are offered to siblings
_GAIN = 0.005  # of the time of a step, from which another's schedule is taken over
Names = tuple[tuple[str, ...], ...]
_GLOBAL_HOOKS = (_hooked._global_forward_pre_hooks, _hooked._global_forward_hooks)  # by numbers that are given out once


def signature(modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor], names: Names, tree: Any) -> Signature:
    """Structure and non-tensor values of the call (``tree``), names of the model's tensors and layout of every flat input,
    flags of the modules, autocast and modes."""
    device_type = device_of_inputs(inputs).type
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    einsum = torch.backends.opt_einsum  # says in which order products are taken
    return (
        names,
        fingerprint(tree),
        tuple(map(tensor_key, inputs)),
        tuple(module.training for module in modules),
        any(module.__dict__.get("gradient_checkpointing") for module in modules),
        autocast and (autocast, torch.is_autocast_cache_enabled(), *map(is_kept, inputs)),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        tuple(map(type, inputs)),
        tuple(map(_attributes, inputs)),
        tuple(map(tuple, _GLOBAL_HOOKS)),
        # Which kernels operators may choose when they are traced; context parallelism exchanges the function itself.
        functional.scaled_dot_product_attention,
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
        einsum.is_available() and (einsum.enabled, einsum.strategy),
    )


def _attributes(tensor: torch.Tensor) -> Any:
    """What Python code put on a tensor, or how it is distributed."""
    own, spec = vars(tensor), spec_of(tensor)
    if spec is not None:
        return spec
    return fingerprint(dict(own)) if own else None


def describe(inputs: Sequence[torch.Tensor], states: int) -> str:
    """The call's tensors in a few words, for messages."""
    tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs[states:]]
    return ", ".join(tensors) or "no tensors"


@dataclass(frozen=True, slots=True, eq=False, repr=False)  # printing a tensor without memory ends the process
class Sample:
    """A call to capture, and the autocast state to do it in, where that is not the one of now."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    autocast: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)

    def without_data(self, device_type: str) -> Sample:
        """The same without floating tensors' memory, in the autocast state of now. Shapes suffice to capture it again for other
        gradients, but values answer the questions, so the integers stay."""
        tensors, tree = flat_arguments(self.args, self.kwargs)
        args, kwargs = structure.unflatten(tree, [like_form(tensor, _without_data(tensor)) for tensor in tensors])
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        keep_casts = torch.is_autocast_cache_enabled()
        autocast = torch.autocast(device_type, dtype if enabled else None, enabled, cache_enabled=keep_casts)
        return Sample(args, kwargs, autocast)


@dataclass(slots=True, eq=False)
class Entry:
    """A planned program, ready to run for the calls with signature ``key`` on which one of ``conditions`` holds, the last used
    first. ``captured`` is the program before there were kernels in it, and ``sample`` what it was captured with. ``for_masks``:
    the entries for the same calls whose gradients arrive otherwise, which share this and the conditions. ``before``: attributes
    of the model as the latest call found them. ``plan`` and ``lowered`` are exchanged where a better plan was found.
    ``version``: the schedules of its ``siblings`` that it knows; ``used``: when, by the count of all calls; ``calls``
    of its own, and when it was ``made``. ``arena``: where its tensors have their places, if there is one. ``most_bytes`` of
    the settings that it was planned by. ``read_again``: see ``runtime.changing``, once that was asked for."""

    key: Signature
    captured: Captured
    plan: Plan
    lowered: Lowered
    conditions: list[Conditions]
    sample: Sample
    for_masks: dict[GradientMask, Entry]
    before: list[attribute_effects.Before] = field(default_factory=list)
    siblings: Siblings | None = None
    version: int = 0
    used: int = 0
    calls: int = 0
    made: float = field(default_factory=time.monotonic)
    arena: Arena | None = None
    most_bytes: int | None = None
    read_again: tuple[int, ...] | None = None

    @property
    def program(self) -> Program:
        return self.lowered.program

    def goes(self, expected: Sequence[bool], modules: Sequence[nn.Module], inputs: list[torch.Tensor]) -> bool:
        """Whether it is for a call whose first checks of values go like this."""
        goes = self.captured.contract.conditions.go(expected)
        return goes and any(one.hold(modules, inputs, {}) for one in self.conditions)


def with_plan(entry: Entry, plan: Plan | None) -> Entry:
    """The entry run by ``plan``, or as it was."""
    return replace(entry, plan=plan, lowered=lowered(entry.program, plan, entry.arena)) if plan else entry


class Siblings:
    """The schedules of programs that are the same operators at other sizes: each is one for all. ``version`` counts them."""

    def __init__(self) -> None:
        self.schedules: list[Schedule] = []
        self.version = 0

    def keep(self, entry: Entry) -> None:
        """Offer the schedule of ``entry``, which is one of them, to the others from now on."""
        entry.siblings = self
        if entry.plan.schedule not in self.schedules:
            self.schedules = [*self.schedules, entry.plan.schedule][-_MOST_SCHEDULES:]
            self.version += 1
        entry.version = self.version

    def take_over(self, entry: Entry) -> None:
        """Give ``entry`` a schedule that was found for another since it was planned, where that is quicker."""
        entry.version, plan = self.version, entry.plan
        for schedule in self.schedules:
            run = simulate(plan.graph, plan.costs, schedule)
            if run.peak_bytes <= plan.budget_bytes and run.time_ns < (1 - _GAIN) * plan.time_ns:
                found = plan.with_schedule(schedule, run)
                plan = found if entry.arena is None or found.is_placed else plan
        if plan is not entry.plan:
            entry.plan, entry.lowered = plan, lowered(entry.program, plan, entry.arena)


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Integers and single numbers as they are, since they answer questions, and sparse ones; else a tensor of the layout
    without memory."""
    if tensor.layout is not torch.strided:
        return tensor.detach()
    if tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    hollow = layouts.without_memory(tensor)
    return hollow if tensor.is_leaf else torch.ops.aten.alias.default(hollow)
