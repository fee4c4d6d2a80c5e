"""Copies of modules that FSDP2 manages.

``fully_shard`` gives a module a class that refuses to be copied, hooks around its forward pass, and bookkeeping in the
module's dictionary. The traced copy is the plain module below, with plain tensors as parameters, and with the casts of
its mixed-precision policy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from lowtide.program.distributed.local import sharding_hooks
from lowtide.program.distributed.sharded import is_sharded, state_of

_BOOKKEEPING = "__composable_api"  # the keys under which torch.distributed's module APIs keep their state
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_bookkeeping(attribute: Any) -> bool:
    """Whether a module's attribute of that name holds torch.distributed's state, not the model's."""
    return str(attribute).startswith(_BOOKKEEPING)


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(model, memo)``, but sharded modules become copies of the plain modules that they were."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    for module in sharded:
        kind: Any = type(module)
        memo[id(module)] = object.__new__(kind.__mro__[kind._orig_cls_mro_index])
    for module in sharded:
        _fill(memo[id(module)], module, memo, is_root=module is model)
    memo.setdefault(id(memo), []).extend(sharded)  # ``copy.deepcopy`` keeps copied originals there
    return copy.deepcopy(model, memo)


def _fill(clone: nn.Module, module: nn.Module, memo: dict[int, Any], is_root: bool) -> None:
    theirs = set(sharding_hooks(module))
    for name, value in module.__dict__.items():
        if is_bookkeeping(name):
            continue
        if name in _HOOKS:
            value = OrderedDict((key, hook) for key, hook in value.items() if key not in theirs)
        clone.__dict__[name] = copy.deepcopy(value, memo)
    if not is_root:  # a planned call does this for the root
        _cast(clone, state_of(module))


def _cast(clone: nn.Module, state: Any) -> None:
    """Make a copy cast its arguments and results as FSDP2's policy for the module says, and collect the gradients of
    its arguments where FSDP2 does, which determines the order in which they are added to others."""
    cast, results, units = state._cast_forward_inputs, state._cast_output_dtype, len(state._fsdp_param_groups)

    def arguments(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = cast(args, kwargs)
        for _ in range(units if torch.is_grad_enabled() else 0):
            given = _passed(given)
        return given

    clone.register_forward_pre_hook(arguments, prepend=True, with_kwargs=True)
    clone.register_forward_hook(lambda module, args, result: results(result))


def _passed(given: Any) -> Any:
    """Arguments, of which all that require gradients have passed through one autograd node."""
    from torch.distributed.fsdp import _common_utils

    if hasattr(_common_utils, "collect_grad_tensors"):
        tensors = _common_utils.collect_grad_tensors(given)
        return _common_utils.replace_grad_tensors(given, iter(_together(tensors)))
    leaves, spec = pytree.tree_flatten(given)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    for place, tensor in zip(places, _together([leaves[place] for place in places]), strict=True):
        leaves[place] = tensor
    return pytree.tree_unflatten(leaves, spec)


def _together(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return _Together.apply(*tensors) if tensors else ()  # type: ignore[no-untyped-call]


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients
