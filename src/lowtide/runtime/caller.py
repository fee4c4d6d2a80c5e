"""For which module a planned ``forward`` is called, inside which modes and transforms, and which inputs require a
gradient.

A planned ``forward`` is an attribute of its module. A copy of these attributes (``copy.copy``, the replicas of
``nn.DataParallel``, libraries that make functional copies of modules) has it too, although its parameters may differ.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide.errors import ExecutionError
from lowtide.objects.walk import variables

T = TypeVar("T")
_DYNAMO = "torch._dynamo.eval_frame"
TRANSFORMED = (
    "%s runs without a plan, outside the budget, under torch.func, forward-mode derivatives, torch.jit.trace, modes "
    "(TorchDispatchMode, TorchFunctionMode), hooks of saved tensors, backward hooks of all modules, or "
    "torch.nn.utils.parametrize.cached"
)
COPIED = "a %s that has the attributes of a planned model runs without a plan, outside the budget: rematerialize it by itself"


def is_compiled_around(frame: types.FrameType | None) -> bool:
    """Whether code compiled by ``torch.compile`` calls this frame, at any depth."""
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == _DYNAMO:
            return True
        frame = frame.f_back
    return False


def calling(frame: types.FrameType) -> types.FrameType:
    """The calling ``frame``, without the wrapper that keeps Dynamo out of a function."""
    outer = frame.f_back
    return outer if outer is not None and frame.f_globals.get("__name__") == _DYNAMO else frame


def copied_module(planned: Any, model: nn.Module | None, frame: types.FrameType) -> nn.Module | None:
    """The other module for which the code in ``frame`` calls ``planned``, the ``forward`` of ``model``; ``None`` if it
    is ``model``.

    In code of ``nn.Module`` and in methods of modules, ``self`` is that module. Raises ``ExecutionError`` if other code
    has such a copy in a variable: the call may be for either.
    """
    known = variables(frame)
    caller = known.get("self")
    named = [caller] if isinstance(caller, nn.Module) else known.values()
    copied = next((one for one in named if has_copied(one, planned, model)), None)
    if copied is None or copied is caller:
        return copied
    raise ExecutionError(
        f"forward of a {type(copied).__name__} is called by itself where there is both a planned model and a copy of its "
        "attributes, so that nobody can tell for which: call the module, module(x) instead of module.forward(x)."
    )


def has_copied(module: Any, planned: Any, model: nn.Module | None) -> bool:
    """Whether ``module`` is not ``model`` but has ``planned`` among its attributes."""
    if module is model or not issubclass(type(module), nn.Module) or vars(module).get("forward") is not planned:
        return False
    return model is None or type(module) is not type(model) or vars(module) is not vars(model)


def let_go(module: nn.Module, planned: Any) -> None:
    """Give a copy the ``forward`` that it would have if the model had not been planned."""
    if planned.had_instance_forward:
        vars(module)["forward"] = planned.original_forward
    else:
        del vars(module)["forward"]


def is_transformed() -> bool:
    """Whether a mode, transform or hook follows each operator beside autograd. It would miss the operators that a plan
    runs."""
    stacks: list[Callable[[], Any]] = [_get_current_function_mode_stack, _get_current_dispatch_mode_stack]
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or bool(of_all._global_backward_hooks or of_all._global_backward_pre_hooks)
        or parametrize._cache_enabled > 0  # a computed parameter is reused by the next call
        or any(_is_foreign(type(mode)) for stack in stacks for mode in stack())
        or any(map(_is_foreign, hooks or ()))
    )


def _is_foreign(value: Any) -> bool:
    """Whether a mode or hook is neither lowtide's nor one that plans support."""
    return not str(getattr(value, "__module__", "")).startswith(
        ("lowtide.", "torch.utils._device", "torch.utils.checkpoint")
    )


def with_required(tensors: Sequence[torch.Tensor], find: Callable[[], T | None], *, stays: bool) -> T | None:
    """Call ``find`` with ``requires_grad`` of these ``tensors`` flipped. If it finds something and ``stays`` is true,
    they stay flipped."""
    found = None
    try:
        _require_otherwise(tensors)
        found = find()
    finally:
        if found is None or not stays:
            _require_otherwise(tensors)
    return found


def _require_otherwise(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.requires_grad_(not tensor.requires_grad)
