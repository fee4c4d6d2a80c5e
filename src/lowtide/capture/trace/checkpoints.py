"""Trace a model as if it had no activation checkpointing of its own: the plan decides what is recomputed."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from lowtide.capture.trace.patches import replaced
from lowtide.objects import structure

_LOG = logging.getLogger(__name__)
_SAID: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Inside, ``torch.utils.checkpoint.checkpoint`` only calls its function. This is logged once per ``model``."""

    def plainly(*args: Any, **kwargs: Any) -> Iterator[None]:
        _say(model)
        yield

    class Plainly:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            """Call the function. Like a reentrant checkpoint, this gives no gradients if none of its tensors requires
            one."""
            _say(model)
            with torch.set_grad_enabled(any(one.requires_grad for one in structure.flatten(args)[0])):
                return function(*args)

    with contextlib.ExitStack() as stack:
        for name, other in (("_checkpoint_without_reentrant_generator", plainly), ("CheckpointFunction", Plainly)):
            if hasattr(torch.utils.checkpoint, name):
                stack.enter_context(replaced(torch.utils.checkpoint, name, other))
        yield


def is_left_to_plan(model: nn.Module) -> bool:
    """Whether a trace of ``model`` ignored its activation checkpointing, so that the program takes more memory than the
    model."""
    return model in _SAID


def _say(model: nn.Module) -> None:
    if model not in _SAID:
        _SAID.add(model)
        _LOG.warning(
            "activation checkpointing inside %s is left to the plan, which decides what is computed again",
            type(model).__name__,
        )
