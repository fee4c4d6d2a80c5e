"""Writes while a model is traced: those into the user's own tensors are refused, and ``tensor.data = value`` is made one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import CaptureError
from lowtide.program.keys import tensor_key
from lowtide.program.layouts import memory_of
from lowtide.program.local import local_of

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class WriteError(Exception):
    """The forward pass writes into ``tensor``, which is a real one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(f"a write into a tensor of shape {tuple(tensor.shape)}")
        self.tensor = tensor


class RefuseWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, nothing is written into real tensors: they are the user's."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(function, torch._ops.OpOverload) and function._schema.is_mutable:
            arguments = enumerate(function._schema.arguments)
            written = [args[i] if i < len(args) else kwargs.get(one.name) for i, one in arguments if one.is_write]
            for leaf in pytree.tree_leaves(written):
                if isinstance(leaf, torch.Tensor) and not isinstance(local_of(leaf), (FakeTensor, FunctionalTensor)):
                    raise WriteError(leaf)
        return function(*args, **kwargs)


def assigned_data(func: Any, args: Sequence[Any], state: Sequence[torch.Tensor]) -> bool:
    """Whether a call is ``tensor.data = value`` for one of ``state``; then the values are written into the memory that it has:
    as MoCo's encoder is averaged. Raises ``CaptureError`` where that is not the same."""
    if func != _SET_DATA or not any(args[0] is tensor for tensor in state):
        return False
    tensor, value = args
    alike = isinstance(value, FunctionalTensor) and tensor_key(tensor.detach()) == tensor_key(value.detach())
    memory = {memory_of(one) for one in state}
    if not alike or memory_of(value) in memory:
        raise CaptureError(
            "the forward pass assigns to .data of a parameter or a buffer what has another layout or is not made in that pass, "
            "which no program follows. Write into it (tensor.data.copy_(...), tensor.mul_(...) in torch.no_grad()), or do it "
            "outside of the forward pass."
        )
    with torch.no_grad():
        tensor.detach().copy_(value)
    return True
