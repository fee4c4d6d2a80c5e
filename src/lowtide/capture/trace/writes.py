"""Writes while a model is traced. Those into the user's own tensors are refused, and ``tensor.data = value`` is made a
write.

Parameters may be written where autograd does not look: under ``torch.no_grad()``, or through ``.data``, as
``nn.Embedding(max_norm=...)`` does, or code that clips or normalizes weights at the start of ``forward``. They stay
leaves, and operators compute their gradients with the values that were written last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._C._dynamo.guards import compute_overlapping_tensors
from torch._functorch._aot_autograd.functional_utils import has_metadata_mutation
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.errors import CaptureError
from lowtide.objects.keys import tensor_key
from lowtide.program.distributed.local import local_of
from lowtide.program.layouts import memory_of

UNSEEN = "unseen"  # a key of ``meta``: written without a new version for autograd
WRITTEN_HISTORY = (
    "the forward pass writes in place into an argument that has a history (F.relu_, clamp_, say), which a plan cannot follow. "
    "Write into a copy, outside the forward pass, or run it under lowtide.online."
)
_GRADIENT: Any = torch.Tensor.grad
GET_GRADIENT = _GRADIENT.__get__
_OF_GRADIENT = (GET_GRADIENT, _GRADIENT.__set__, _GRADIENT.__delete__)
_OWN_USES = 2  # references to a tensor's memory: the tensor's own, and the caller's
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class WriteError(Exception):
    """Raised if the forward pass writes into ``tensor``, a real one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(f"a write into a tensor of shape {tuple(tensor.shape)}")
        self.tensor = tensor


class RefuseWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which real tensors, which are the user's, are not written."""

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


class AssignedData:
    """Follows ``tensor.data = value`` for tensors of ``state`` (MoCo's averaged encoder, say). The values are written
    into the memory that the tensor has. Raises ``CaptureError`` if that is not equivalent."""

    def __init__(self, state: Sequence[torch.Tensor]) -> None:
        self.state = state
        self._values: list[torch.Tensor] = []

    def takes(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether a call is such an assignment. If so, it is performed."""
        name = getattr(func, "__name__", "")
        if self._values and args and name.endswith("_") and not name.endswith("__"):
            self._refuse(isinstance(args[0], torch.Tensor) and memory_of(args[0]) in map(memory_of, self._values))
        if func != _SET_DATA or not any(args[0] is tensor for tensor in self.state):
            return False
        tensor, value = args
        alike = isinstance(value, FunctionalTensor) and tensor_key(tensor.detach()) == tensor_key(value.detach())
        self._refuse(not alike or memory_of(value) in map(memory_of, self.state))
        # In eager, views keep the former memory, and the value may have views of its own.
        self._refuse(any(_uses(one) > _OWN_USES for one in (tensor, value)))
        self._values.append(value)
        with torch.no_grad():
            tensor.detach().copy_(value)
        return True

    def _refuse(self, differs: bool) -> None:
        if differs:
            raise CaptureError(
                "the forward pass assigns to .data of a parameter or a buffer what has another layout, is not made in that "
                "pass or is written into afterwards, or keeps a view of what it was, which no program follows. Write into it "
                "(tensor.data.copy_(...), tensor.mul_(...) in torch.no_grad()), or do it outside of the forward pass."
            )


def _uses(tensor: torch.Tensor) -> int:
    """How many references hold the tensor's memory, the caller's included."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def refuse_gradients(func: Any, args: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
    """Raise ``CaptureError`` for a call that reads or sets the gradient of one of the tensors ``given``."""
    if func in _OF_GRADIENT and any(args[0] is tensor for tensor in given):
        raise CaptureError(
            "the forward pass reads or sets .grad of a parameter, a buffer or an argument, which no program can follow. Do "
            "that outside of the forward pass and pass what it decides, or run the model under lowtide.online."
        )


def refuse_retained(func: Any, args: Sequence[Any], state: Sequence[torch.Tensor]) -> None:
    """Raise ``CaptureError`` for ``retain_grad()`` of a tensor that may not be a leaf; for parameters and buffers it
    does nothing."""
    if func is torch.Tensor.retain_grad and not any(args[0] is tensor for tensor in state):
        raise CaptureError(
            "the forward pass calls retain_grad() on what it computes, or on an argument, whose gradient planned calls would "
            "not put there. Leave that to code around the model, or run it in parts or under lowtide.online."
        )


class GradientRequiredError(CaptureError):
    """Raised if the forward pass makes tensors that it is given require a gradient, or no longer require one, before it
    reads them. It is one program if they do so when it begins. ``numbers``: which tensors, of the model and of the
    call."""

    def __init__(self, numbers: Collection[int]) -> None:
        super().__init__(
            "the forward pass calls requires_grad_() on a parameter, a buffer or an argument. Call it before the forward pass; "
            "planned calls of lowtide.rematerialize do so by themselves when they begin."
        )
        self.numbers = tuple(sorted(numbers))


def refuse_required(given: Sequence[torch.Tensor], before: Sequence[bool]) -> None:
    """Raise ``CaptureError`` if tensors require a gradient otherwise than ``before``."""
    different = [tensor for tensor, one in zip(given, before, strict=True) if tensor.requires_grad != one]
    if any(not tensor.is_leaf for tensor in different):
        raise CaptureError(
            "the forward pass writes what has a gradient into a buffer or an argument (self.mean.lerp_(x.mean(0), 0.1)), which "
            "has its history from then on, and keeps it from call to call. Write x.detach(), or within torch.no_grad()."
        )
    if different:
        raise CaptureError(
            "the forward pass calls requires_grad_() on a parameter, a buffer or an argument that it has read before, which "
            "planned calls would not do. Call it before the forward pass, or run the model under lowtide.online."
        )


def refuse_seen(given: torch.Tensor, history: Any) -> None:
    """Raise ``CaptureError`` if autograd has seen the writes into a tensor, whose ``grad_fn`` was ``history``."""
    if given.grad_fn is not history:
        raise CaptureError(WRITTEN_HISTORY)


def refuse_reshaped(given: torch.Tensor, before: torch.Tensor) -> None:
    """Raise ``CaptureError`` if a functional tensor has another layout or memory than ``before``."""
    if has_metadata_mutation(given, before, check_only_storage_mutation=False):
        raise CaptureError(
            "the forward pass gives an argument, a parameter or a buffer another shape or other memory in place (t_(), "
            "resize_(), set_()), which a plan cannot follow. Work on a view of it (tensor.t()), or run the model under "
            "lowtide.online."
        )


def refuse_shared(given: Sequence[torch.Tensor], written: Sequence[int]) -> None:
    """Raise ``CaptureError`` if one of the ``written`` tensors, given by number, overlaps with another."""
    sharing: dict[int, list[torch.Tensor]] = {}
    for each in given:
        sharing.setdefault(memory_of(each), []).append(each)
    for number in written:
        one = given[number]
        others = [other for other in sharing[memory_of(one)] if other is not one]
        symbolic = any(tensor._has_symbolic_sizes_strides for tensor in (one, *others))
        if any(compute_overlapping_tensors([one, other], symbolic=symbolic) for other in others):
            raise CaptureError(
                "the forward pass writes into memory that several buffers or arguments share (a view of a buffer that is a "
                "buffer itself, say), which a plan cannot follow. Form the view in the forward pass, pass a copy, or run it "
                "under lowtide.online."
            )


def refuse_late(given: Sequence[FunctionalTensor], before: Sequence[torch.Tensor]) -> None:
    """Raise ``CaptureError`` if functional tensors no longer have the values that they had ``before`` the backward
    pass."""
    if any(one.from_functional() is not value for one, value in zip(given, before, strict=True)):
        raise CaptureError(
            "the model writes into a buffer or an argument in the backward pass. Write into it in the forward pass, or run it "
            "under lowtide.online."
        )


def refuse_unregistered(module: fx.GraphModule) -> None:
    """Raise ``WriteError`` for writes into tensors that are not inputs of the program."""
    for node in module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            raise WriteError(node.all_input_nodes[0].meta["val"])
