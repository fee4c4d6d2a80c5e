"""The leaves of a backward pass: what adds to their gradients, and when it does."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def accelerate_accumulates() -> bool:
    """Whether accelerate (and transformers' Trainer with it) says that this pass is not the last one before a step."""
    module = sys.modules.get("accelerate.state")
    shared = getattr(getattr(module, "GradientState", None), "_shared_state", {})
    return not shared.get("sync_gradients", True)


def accumulates(nodes: Collection[Any]) -> bool:
    """Whether the backward pass adds to ``.grad`` at all of these ``nodes``."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # of torch.autograd.grad
        return False


def accumulating_nodes(node: Any) -> dict[int, Any]:
    """Below the chain of nodes of a call that begins with ``node``: by leaf, what adds to its gradient."""
    found: dict[int, Any] = {}
    chain = [node]
    while chain:
        for following, _ in chain.pop().next_functions:
            if getattr(following, "call", None) is node.call:
                chain.append(following)
            elif hasattr(following, "variable"):
                found[id(following.variable)] = following
    return found


def has_hooks(tensor: torch.Tensor) -> bool:
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def pointer(tensor: torch.Tensor) -> int:
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if plain and tensor.numel() else id(tensor)
