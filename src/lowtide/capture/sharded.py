"""Copies of modules that FSDP2 manages.

``fully_shard`` gives a module a class that refuses to be copied, hooks around its forward pass, and its own bookkeeping in
the module's dictionary. What is traced is the module below all that: between those hooks its parameters are plain tensors.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from typing import Any

from torch import nn

from lowtide.errors import CaptureError

_BOOKKEEPING = "__composable_api"  # the keys under which torch.distributed's module APIs keep their state


def is_bookkeeping(attribute: Any) -> bool:
    """Whether a module's attribute of that name holds torch.distributed's state, not the model's."""
    return str(attribute).startswith(_BOOKKEEPING)


def is_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to this very module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def refuse_sharded_parts(model: nn.Module) -> None:
    """Raises ``CaptureError`` where a submodule gathers parameters of its own: a region must not span several units."""
    inner = next((name for name, module in model.named_modules() if name and is_sharded(module)), None)
    if inner is not None:
        raise CaptureError(
            f"submodule {inner!r} is a unit of fully_shard, which gathers its parameters around its own forward pass. "
            "Rematerialize each unit by itself, with lowtide.integrations.fsdp.rematerialize_blocks before fully_shard."
        )


def copy_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(model, memo)``; of a sharded module, a copy of the plain module that it was."""
    if not is_sharded(model):
        return copy.deepcopy(model, memo)
    kind: Any = type(model)
    plain = kind.__mro__[kind._orig_cls_mro_index]
    clone: nn.Module = object.__new__(plain)
    memo[id(model)] = clone
    hooks = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks"}
    for name, value in model.__dict__.items():
        if is_bookkeeping(name):
            continue
        clone.__dict__[name] = OrderedDict() if name in hooks else copy.deepcopy(value, memo)
    return clone
