"""Distributed tensors (``torch.distributed.tensor.DTensor``) as a program sees them: the local tensor of this rank.

What operators read of a distributed parameter or argument is its ``form``: a plain leaf tensor in the memory of its local
tensor. Gradients leave the program as plain tensors too, and become distributed ones where they reach what the form is of.
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
_WHOLES: Any = WeakTensorKeyDictionary()  # by form: a weak reference to what it is of
_HELD: dict[Any, Any] = _WHOLES.data  # what is in it, which every call asks for


def has_distributed() -> bool:
    """Whether there can be distributed tensors in this process."""
    return "torch.distributed.tensor" in sys.modules and torch.distributed.is_initialized()


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a distributed tensor."""
    if type(tensor) in _PLAIN:  # most are, and every call asks
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a distributed one; any other itself."""
    return tensor._local_tensor if is_distributed(tensor) else tensor  # type: ignore[attr-defined]


def form_of(tensor: torch.Tensor) -> torch.Tensor:
    """What operators read of ``tensor``: itself, unless it is distributed."""
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
    """Whether one of them is a form of a parameter that FSDP2 has sharded."""
    return sharded.GatheredForm in map(type, tensors)


def whole_of(form: torch.Tensor) -> torch.Tensor:
    """What a form is of; any other tensor itself."""
    if not _HELD:
        return form
    whole = _WHOLES.get(form)
    found: torch.Tensor | None = form if whole is None else whole()
    return form if found is None else found


def version_of(tensor: torch.Tensor) -> int | None:
    """Counts the writes into it, or into what it stands for."""
    own = sharded.version_of(tensor)
    if not _HELD or own is None:
        return own
    whole = whole_of(tensor)
    return own if whole is tensor else own + whole._version


def address_of(tensor: torch.Tensor) -> int | None:
    """Where its data lie; ``None`` where that is in several places, or in others from time to time."""
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
    """Arguments of a call as the hooks on a model with distributed parameters hand them on, but for FSDP2's: what makes it
    parallel may distribute them there."""
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
    """The keys of the hooks that FSDP2 has on it."""
    if sharded.is_sharded(module):
        state = sharded.state_of(module)
        for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
            yield from (each.id for each in getattr(handle, "handles", (handle,)))


def spec_of(tensor: torch.Tensor) -> Any:
    """Mesh, placements and layout of a distributed tensor, or of what a form is of; ``None`` of others."""
    if type(tensor) is sharded.GatheredForm:
        return tensor.spec
    whole = whole_of(tensor)
    return whole._spec if is_distributed(whole) else None  # type: ignore[attr-defined]


def specs_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """``spec_of`` each of them; nothing where none is distributed."""
    if not (_HELD or _are_gathered(tensors)):
        return ()
    found = tuple(map(spec_of, tensors))
    return found if any(found) else ()


def like_form(form: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """In the place of a form, another ``local`` tensor: distributed as what the form is of."""
    spec = spec_of(form)
    return local if spec is None else _made(local.detach(), spec, form.requires_grad)


def spec_for(form: torch.Tensor, placed: Any) -> Any:
    """How the gradient of what ``form`` is of lies, where the trace had it as ``placed``: over the same ranks in the same
    way, and in memory like the tensor, as a program's gradients of parameters do. ``None`` where it is not distributed."""
    spec = spec_of(form)
    if spec is None:
        return None
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placed = placed or spec  # of another program of the call
    return DTensorSpec(
        placed.mesh, placed.placements, tensor_meta=TensorMeta(spec.shape, spec.stride, spec.tensor_meta.dtype)
    )


def whole_gradient(local: torch.Tensor | None, spec: Any) -> torch.Tensor | None:
    """A gradient as autograd takes it for a distributed tensor."""
    return local if spec is None or local is None else _made(local, spec, False)


def _made(local: torch.Tensor, spec: Any, requires_grad: bool) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]


def distributed(local: torch.Tensor, form: torch.Tensor, note: Callable[[Any], None]) -> torch.Tensor:
    """In a trace: the distributed tensor of a ``local`` one, as what ``form`` is of lies; itself where that is not distributed.
    ``note`` hears how its gradient lies when that arrives: of a sharded parameter as that does, before it is reduced."""
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
        # Where it lies in other placements than the tensor its parts may have other sizes, which autograd would refuse.
        return (
            local if local.shape == ctx.shape else local.as_strided(ctx.shape, [0] * len(ctx.shape)),
            None,
            None,
            None,
        )


def with_own_sizes(joint: torch.fx.GraphModule, placed: Mapping[int, Any]) -> None:
    """Let the joint graph return gradients of distributed tensors in the sizes that they have (``_Distributed``)."""
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
    """In a trace: results with the local ones of distributed tensors, and how these lie; ``None`` of others. ``inputs``: local
    ones by the ids of what they were made."""
    specs = tuple(tensor._spec if is_distributed(tensor) else None for tensor in results)  # type: ignore[attr-defined]
    if not any(specs):
        return list(results), specs
    found = [
        tensor if spec is None else inputs[id(tensor)] if id(tensor) in inputs else tensor.to_local()  # type: ignore[attr-defined]
        for tensor, spec in zip(results, specs, strict=True)
    ]
    return found, specs


def formed(result: torch.Tensor, spec: Any) -> torch.Tensor:
    """A result of a call as it lies in ``spec``: its gradient arrives in the placements that the program was traced for."""
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
