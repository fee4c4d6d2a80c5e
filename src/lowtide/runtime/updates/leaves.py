"""The leaves of a backward pass: what adds to their gradients, and when."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def accelerate_accumulates() -> bool:
    """Whether accelerate (and transformers' Trainer with it) says that more passes follow before the step."""
    module = sys.modules.get("accelerate.state")
    shared = getattr(getattr(module, "GradientState", None), "_shared_state", {})
    return not shared.get("sync_gradients", True)


def accumulates(nodes: Collection[Any]) -> bool:
    """Whether the current backward pass adds to ``.grad`` at all of these ``nodes``."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # in torch.autograd.grad
        return False


def accumulating_nodes(node: Any) -> dict[int, Any]:
    """The nodes that accumulate gradients of the call whose chain begins with ``node``, by id of the leaf."""
    found: dict[int, Any] = {}
    chain = [node]
    while chain:
        for following, _ in chain.pop().next_functions:
            if getattr(following, "call", None) is node.call:
                chain.append(following)
            elif hasattr(following, "variable"):
                found[id(following.variable)] = following
    return found


def pointer(tensor: torch.Tensor) -> int:
    plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    return tensor.untyped_storage().data_ptr() if plain and tensor.numel() else id(tensor)


class OtherPasses:
    """Finds other passes that add to the gradients of parameters about to be updated: waiting calls of the same model,
    or of other models with the same parameters (two heads on one encoder). The registry contains all models."""

    _every: ClassVar[weakref.WeakSet[OtherPasses]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        # The id of the latest backward pass that kept gradients, and the ids of their tensors.
        self._kept: tuple[int, frozenset[int]] = (-1, frozenset())
        self._every.add(self)

    def called(self, call: Any) -> None:
        """A forward pass has run."""
        self._calls.add(call)

    def keeps(self, tensors: Sequence[torch.Tensor]) -> None:
        """The current backward pass keeps the gradients of these tensors, including what other passes add."""
        self._kept = torch._C._current_graph_task_id(), frozenset(map(id, tensors))

    def add_to(self, parameters: Sequence[torch.Tensor], call: Any) -> bool:
        """Whether a pass other than that of ``call`` adds to the gradients of these parameters."""
        ids, task = set(map(id, parameters)), torch._C._current_graph_task_id()
        every = list(self._every)
        waiting = (
            other for one in every for other in list(one._calls) if other is not call and other.generator is not None
        )
        kept = (one._kept[1] for one in every if one._kept[0] == task)
        return not all(map(ids.isdisjoint, kept)) or any(not ids.isdisjoint(map(id, other.inputs)) for other in waiting)
