"""Whether a call runs under something that follows each of its operators, as transformations and modes do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def is_transformed() -> bool:
    """Whether something follows each operator that autograd does not know of: what a plan runs would be missing there."""
    stacks: list[Callable[[], Any]] = [_get_current_function_mode_stack, _get_current_dispatch_mode_stack]
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or bool(module._global_backward_hooks or module._global_backward_pre_hooks)
        or parametrize._cache_enabled > 0  # a parameter that one call computed serves the next
        or any(_is_foreign(type(mode)) for stack in stacks for mode in stack())
        or any(map(_is_foreign, hooks or ()))
    )


def _is_foreign(value: Any) -> bool:
    """Whether a mode or a hook is neither of this project, nor one that plans run under."""
    return not str(getattr(value, "__module__", "")).startswith(
        ("lowtide.", "torch.utils._device", "torch.utils.checkpoint")
    )
