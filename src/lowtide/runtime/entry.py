"""A call to capture, and a planned program that is ready to run for calls like it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.capture import Captured
from lowtide.capture.capture import flat_arguments
from lowtide.capture.contract import Conditions
from lowtide.capture.python_state import attribute_effects
from lowtide.lower import Lowered
from lowtide.planning import Plan
from lowtide.program import Program, layouts, structure
from lowtide.program.results import GradientMask
from lowtide.runtime.signature import Signature


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
        args, kwargs = structure.unflatten(tree, [_without_data(tensor) for tensor in tensors])
        enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        keep_casts = torch.is_autocast_cache_enabled()
        autocast = torch.autocast(device_type, dtype if enabled else None, enabled, cache_enabled=keep_casts)
        return Sample(args, kwargs, autocast)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A planned program, ready to run for the calls with signature ``key`` on which one of ``conditions`` holds, the last used
    first. ``captured`` is the program before there were kernels in it, and ``sample`` what it was captured with. ``for_masks``:
    the entries for the same calls whose gradients arrive otherwise, which share this and the conditions. ``before``: attributes
    of the model as the latest call found them."""

    key: Signature
    captured: Captured
    plan: Plan
    lowered: Lowered
    conditions: list[Conditions]
    sample: Sample
    for_masks: dict[GradientMask, Entry]
    before: list[attribute_effects.Before] = field(default_factory=list)

    @property
    def program(self) -> Program:
        return self.lowered.program


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    """Integers and single numbers as they are, since they answer questions; else a tensor of the layout without memory."""
    if tensor.dim() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    hollow = layouts.without_memory(tensor)
    return hollow if tensor.is_leaf else torch.ops.aten.alias.default(hollow)
