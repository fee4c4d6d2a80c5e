"""Functional collectives (``torch.distributed._functional_collectives``) as operators of a program.

A functional collective only begins; ``wait_tensor`` returns the same tensor when it has ended. In a program both are
one operator, ``Waited``, whose result may be read. It runs once, at its place among the others, because ranks wait for
each other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import distributed

from lowtide.memory.allocators import allocated_bytes
from lowtide.program.distributed.communication import communicating, wait_for_copies

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_WAITS = ("wait_tensor",)
_ALONE = "_dtensor::shard_dim_alltoall"  # waits by itself


class Waited:
    """``operator``, a functional collective, with the wait for its results."""

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        self.operator = operator
        self.__name__, self.__module__ = str(operator), "lowtide"
        self.__qualname__ = self.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        before = allocated_bytes(device)
        result = self.begin(*args, **kwargs)()
        wait_for_copies(before, _tensors(result), device)
        return result

    def begin(self, *args: Any, **kwargs: Any) -> Callable[[], Any]:
        """Begin it beside computing. The returned function waits for it and returns the result."""
        result = self.operator(*args, **kwargs)

        def end() -> Any:
            if self.operator._schema.name != _ALONE:
                with communicating(str(self.operator)):
                    for each in _tensors(result):
                        torch.ops._c10d_functional.wait_tensor(each)
            return result

        return end


def _tensors(result: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]


@functools.cache
def waited(operator: torch._ops.OpOverload) -> Waited:
    """The program's operator for a functional collective."""
    return Waited(operator)


def is_wait(target: Any) -> bool:
    """Whether a PyTorch operator waits for a functional collective."""
    return _is_functional(target) and target._schema.name.split("::")[1] in _WAITS


def is_collective(target: Any) -> bool:
    """Whether a PyTorch operator is a functional collective."""
    return _is_functional(target) and not is_wait(target)


def collectives_begun() -> float:
    """How many collectives this process has begun so far, in all its process groups. Not equal to any number if a
    backend does not count them."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 0
    groups = distributed.distributed_c10d._world.pg_map
    own = [group for group in groups if isinstance(group, distributed.ProcessGroup)]
    try:
        return sum(group._get_sequence_number_for_group() for group in own)  # type: ignore[attr-defined]
    except RuntimeError:
        return math.nan


def _is_functional(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in _NAMESPACES or target._schema.name == _ALONE
