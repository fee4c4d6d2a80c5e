"""Writes into the user's own tensors are refused while a model is traced."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.program.local import local_of


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
