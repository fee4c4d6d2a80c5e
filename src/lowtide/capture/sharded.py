"""Copies of modules that FSDP2 manages.

``fully_shard`` gives a module a class that refuses to be copied, hooks around its forward pass, and its own bookkeeping in
the module's dictionary. What is traced is the module below all that, whose parameters are plain tensors, with the casts that
its policy of mixed precision makes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.program.sharded import is_sharded, state_of

_BOOKKEEPING = "__composable_api"  # the keys under which torch.distributed's module APIs keep their state
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def is_bookkeeping(attribute: Any) -> bool:
    """Whether a module's attribute of that name holds torch.distributed's state, not the model's."""
    return str(attribute).startswith(_BOOKKEEPING)


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(model, memo)``; of sharded modules, copies of the plain modules that they were."""
    sharded = [module for module in model.modules() if is_sharded(module)]
    for module in sharded:
        kind: Any = type(module)
        memo[id(module)] = object.__new__(kind.__mro__[kind._orig_cls_mro_index])
    for module in sharded:
        _fill(memo[id(module)], module, memo, is_root=module is model)
    return copy.deepcopy(model, memo)


def _fill(clone: nn.Module, module: nn.Module, memo: dict[int, Any], is_root: bool) -> None:
    theirs = set(_own_hooks(module))
    for name, value in module.__dict__.items():
        if is_bookkeeping(name):
            continue
        if name in _HOOKS:
            value = OrderedDict((key, hook) for key, hook in value.items() if key not in theirs)
        clone.__dict__[name] = copy.deepcopy(value, memo)
    if not is_root:  # around the root's, a planned call makes them
        _cast(clone, state_of(module))


def _cast(clone: nn.Module, state: Any) -> None:
    """Have a copy cast its arguments and results as FSDP2's policy says for the module."""
    arguments, results = state._cast_forward_inputs, state._cast_output_dtype
    clone.register_forward_pre_hook(
        lambda module, args, kwargs: arguments(args, kwargs), prepend=True, with_kwargs=True
    )
    clone.register_forward_hook(lambda module, args, result: results(result))


def _own_hooks(module: nn.Module) -> Iterator[int]:
    """The keys of the hooks that FSDP2 has on it."""
    state = state_of(module)
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        yield from (each.id for each in getattr(handle, "handles", (handle,)))
