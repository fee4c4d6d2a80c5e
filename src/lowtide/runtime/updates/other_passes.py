"""What else adds to the gradients of parameters that a backward pass is about to update: calls of the same model that wait for
it, and of other models with the same parameters (two heads on one encoder).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch


class OtherPasses:
    """Those of one model, which all others are asked about as well."""

    _every: ClassVar[weakref.WeakSet[OtherPasses]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        # The latest backward pass in which gradients were kept, by its number, and whose.
        self._kept: tuple[int, frozenset[int]] = (-1, frozenset())
        self._every.add(self)

    def called(self, call: Any) -> None:
        """A forward pass has run."""
        self._calls.add(call)

    def keeps(self, tensors: Sequence[torch.Tensor]) -> None:
        """The backward pass that is under way keeps the gradients of these, and so those that others add to them."""
        self._kept = torch._C._current_graph_task_id(), frozenset(map(id, tensors))

    def add_to(self, parameters: Sequence[torch.Tensor], call: Any) -> bool:
        """Whether another one than ``call`` adds to the gradients of these."""
        ids, task = set(map(id, parameters)), torch._C._current_graph_task_id()
        every = list(self._every)
        waiting = (
            other for one in every for other in list(one._calls) if other is not call and other.generator is not None
        )
        kept = (one._kept[1] for one in every if one._kept[0] == task)
        return not all(map(ids.isdisjoint, kept)) or any(not ids.isdisjoint(map(id, other.inputs)) for other in waiting)
