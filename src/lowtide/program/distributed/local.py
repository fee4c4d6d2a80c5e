"""Distributed tensors (``torch.distributed.tensor.DTensor``) in a program: the local tensor of this rank.

Operators read the ``form`` of a distributed parameter or argument: a plain leaf tensor in the memory of its local
tensor. Gradients leave the program as plain tensors, and become distributed ones when they reach the tensor of the
form.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.program.distributed import sharded
from lowtide.program.roles import Gradient

_PLAIN = (torch.Tensor, nn.Parameter)
_VERSION = operator.attrgetter("_version")
_FORMS: Any = WeakTensorKeyDictionary()  # by distributed tensor
_WHOLES: Any = WeakTensorKeyDictionary()  # by form: a weak reference to its tensor
_HELD: dict[Any, Any] = _WHOLES.data  # its content, which every call looks up


def has_distributed() -> bool:
    """Whether there can be distributed tensors in this process."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a distributed one."""
    if type(tensor) in _PLAIN:  # the common case, asked in every call
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a distributed one; other tensors unchanged."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that operators read for ``tensor``: itself, unless it is distributed."""
    if not is_distributed(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    form: torch.Tensor | None = _FORMS.get(tensor)
    if form is None or not _same_memory(form, local):
        form = local.detach()
        _FORMS[tensor], _WHOLES[form] = form, weakref.ref(tensor)
    if form.requires_grad != tensor.requires_grad:
        form.requires_grad_(tensor.requires_grad)
    return form


def has_forms() -> bool:
    """Whether anything in this process has been distributed."""
    return bool(_HELD)


def _are_gathered(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them is the form of a parameter that FSDP2 has sharded."""
    return sharded.GatheredForm in map(type, tensors)


def whole_of(form: torch.Tensor) -> torch.Tensor:
    """The tensor of a form; other tensors unchanged."""
    if not _HELD:
        return form
    whole = _WHOLES.get(form)
    found: torch.Tensor | None = form if whole is None else whole()
    return form if found is None else found


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter of the tensor, or of the tensor that it is a form of."""
    own = sharded.version_of(tensor)
    if not _HELD or own is None:
        return own
    whole = whole_of(tensor)
    return own if whole is tensor else own + whole._version


def address_of(tensor: torch.Tensor) -> int | None:
    """The address of the tensor's data; ``None`` if it lies in several places, or moves."""
    try:
        return None if type(tensor) is sharded.GatheredForm else tensor.data_ptr()
    except RuntimeError:  # sparse
        return None


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """``version_of`` each of them."""
    if _HELD or _are_gathered(tensors) or any(map(torch.Tensor.is_inference, tensors)):
        return [version_of(tensor) for tensor in tensors]
    return [*map(_VERSION, tensors)]


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """``address_of`` each of them."""
    if not _are_gathered(tensors):
        with contextlib.suppress(RuntimeError):  # sparse
            return [*map(torch.Tensor.data_ptr, tensors)]
    return [address_of(tensor) for tensor in tensors]


def hooked(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Arguments of a call after the hooks on a model with distributed parameters, without FSDP2's. Tensor parallelism
    may distribute them there."""
    if not (isinstance(args, Sequence) and any(map(is_distributed, model.parameters()))):
        return args, kwargs
    args, theirs = tuple(args), set(sharding_hooks(model))
    for number, hook in model._forward_pre_hooks.items():
        if number in theirs:
            continue
        if number in model._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(model, args, kwargs) or (args, kwargs)
        else:
            found = hook(model, args)
            args = args if found is None else found if isinstance(found, tuple) else (found,)
    return args, kwargs


def sharding_hooks(module: nn.Module) -> Iterator[int]:
    """The keys of FSDP2's hooks on the module."""
    if sharded.is_sharded(module):
        state = sharded.state_of(module)
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            yield from (each.id for each in getattr(handle, "handles", (handle,)))


def spec_of(tensor: torch.Tensor) -> Any:
    """Mesh, placements and layout of a distributed tensor, or of the tensor of a form; ``None`` for others."""
    if type(tensor) is sharded.GatheredForm:
        return tensor.spec
    whole = whole_of(tensor)
    return whole._spec if is_distributed(whole) else None  # type: ignore[attr-defined]


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """``spec_of`` each of them; empty if none is distributed."""
    if not (_HELD or _are_gathered(tensors)):
        return ()
    found = tuple(map(spec_of, tensors))
    return found if any(found) else ()


def like_form(form: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Another ``local`` tensor in place of a form: distributed like the tensor of the form."""
    spec = spec_of(form)
    return local if spec is None else _made(local.detach(), spec, form.requires_grad)


def spec_for(form: torch.Tensor, placed: Any) -> Any:
    """The spec of the gradient for the tensor of ``form``. It is over the same ranks in the placements of the trace
    (``placed``), and its layout is that of the tensor, like a program's gradients of parameters. ``None`` if it is
    not distributed."""
    spec = spec_of(form)
    if spec is None:
        return None
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placed = placed or spec  # that of another program for the call
    return DTensorSpec(
        placed.mesh, placed.placements, tensor_meta=TensorMeta(spec.shape, spec.stride, spec.tensor_meta.dtype)
    )


def whole_gradient(local: torch.Tensor | None, spec: Any) -> torch.Tensor | None:
    """A gradient in the form in which autograd takes it for a distributed tensor."""
    return local if spec is None or local is None else _made(local, spec, False)


def _made(local: torch.Tensor, spec: Any, requires_grad: bool) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def distributed(local: torch.Tensor, form: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
    """In a trace: the distributed tensor of a ``local`` one, placed like the tensor of ``form``; ``local`` itself if
    that is not distributed. ``note`` is called with the placements of its gradient when that arrives; for a sharded
    parameter these are the placements before it is reduced."""
    spec = spec_of(form)
    if spec is None:
        return local
    made: torch.Tensor = _Distributed.apply(local, spec, note, type(form) is sharded.GatheredForm)  # type: ignore[no-untyped-call]
    return made


class _Distributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Any, note: Callable[[Any], None], alike: bool) -> torch.Tensor:
        ctx.note, ctx.shape, ctx.placements = note, local.shape, spec.placements if alike else None
        return _made(local.detach(), spec, local.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None, None, None]:
        if ctx.placements not in (None, gradient.placements):
            gradient = gradient.redistribute(placements=ctx.placements)
        ctx.note(gradient._spec)
        local = gradient._local_tensor
        # In other placements than the tensor's, its parts may have other sizes, which autograd would refuse.
        return (
            local if local.shape == ctx.shape else local.as_strided(ctx.shape, [0] * len(ctx.shape)),
            None,
            None,
            None,
        )


def with_own_sizes(joint: torch.fx.GraphModule, placed: Mapping[int, Any]) -> None:
    """Make the joint graph return gradients of distributed tensors in their own sizes (``_Distributed``)."""
    output = next(iter(reversed(joint.graph.nodes)))
    returned = list(output.args[0])
    for number, role in enumerate(output.meta["role"]):
        if isinstance(role, Gradient) and role.input in placed:
            node = returned[number]
            if node.target is torch.ops.aten.as_strided.default and not any(node.args[2]):
                returned[number] = node.args[0]
    output.args = (type(output.args[0])(returned),)


def local_results(
    results: Sequence[torch.Tensor], inputs: Mapping[int, torch.Tensor]
) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """In a trace: results with local tensors in place of distributed ones, and the specs of these (``None`` for
    others). ``inputs``: local tensors by the ids of the distributed tensors made from them."""
    specs = tuple(tensor._spec if is_distributed(tensor) else None for tensor in results)  # type: ignore[attr-defined]
    if not any(specs):
        return list(results), specs
    found = [
        tensor if spec is None else inputs[id(tensor)] if id(tensor) in inputs else tensor.to_local()  # type: ignore[attr-defined]
        for tensor, spec in zip(results, specs, strict=True)
    ]
    return found, specs


def formed(result: torch.Tensor, spec: Any) -> torch.Tensor:
    """A result of a call, distributed by ``spec``. Its gradient arrives in the placements for which the program was
    traced."""
    whole = whole_of(result)
    if spec is None or whole is not result:
        return whole
    from torch.distributed.tensor import DTensor

    layout = {"shape": spec.shape, "stride": spec.stride}
    return DTensor.from_local(result, spec.mesh, spec.placements, run_check=False, **layout)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )
