"""The tensors of a call, and the structure around them.

Attributes that code sets on a tensor (``x.mask = mask``) belong to the call: tensors among them are inputs too. If a
tensor of the model is among the arguments, it stays the model's tensor.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.errors import CaptureError, PlanError
from lowtide.objects import structure
from lowtide.program.distributed.local import form_of

_KINDS = (torch.Tensor, nn.Parameter, FunctionalTensor)
_PYTORCH = "elem"  # an attribute that PyTorch sets on functional tensors
_COMPILERS = frozenset({  # what Dynamo puts on tensors that it is told to treat in some way (``mark_static_address``)
    "_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_hint_overrides", "_dynamo_shape_ids", "_dynamo_static_indices",
    "_dynamo_static_input_type", "_dynamo_strict_unbacked_indices", "_dynamo_unbacked_bounds", "_dynamo_unbacked_indices",
    "_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking", "_specialize_on",
})  # fmt: skip


def require_call(args: object, kwargs: object) -> None:
    """Raise ``PlanError`` unless ``args`` and ``kwargs`` are a call's positional and keyword arguments (and not a
    single tensor, or a budget, say)."""
    meant = ""
    for given in (args, kwargs):
        if isinstance(given, str | numbers.Real):
            meant = f" A budget is given by its name: budget={given!r}."
    if isinstance(args, (torch.Tensor, str)) or not isinstance(args, Sequence):
        kind = type(args).__name__
        raise PlanError(
            f"args is a {kind}, but stands for all positional arguments of the model: give a tuple, say (x,).{meant}"
        )
    if not isinstance(kwargs, Mapping | None):
        kind = type(kwargs).__name__
        raise PlanError(f"kwargs is a {kind}, not a dictionary of the model's keyword arguments.{meant}")


def flat_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any] | None, state: Sequence[torch.Tensor] = ()
) -> tuple[list[torch.Tensor], Any]:
    """The call's distinct tensors that are not in the model's ``state`` (for distributed tensors, their forms), and the
    structure for ``rebuilt``."""
    require_call(args, kwargs)
    call = tuple(args), dict(kwargs or {})
    found, arguments = _flat((call, ()), state)
    attributes = [put_on(tensor) for tensor in found]
    return _flat((call, attributes), state) if any(attributes) else (found, arguments)


def _flat(tree: Any, state: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
    tensors, arguments = structure.flatten(tree, state)
    return structure.distinct([form_of(tensor) for tensor in tensors], arguments, state)


def rebuilt(
    arguments: Any,
    state: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    number: Callable[[structure.Changing], Any] = lambda one: one,
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The ``(args, kwargs)`` of a call with these ``tensors``, with their attributes set. ``number``: returns the value
    for a number that changes from call to call."""
    if structure.changing(arguments):
        arguments = structure.replaced(
            arguments, lambda leaf: number(leaf) if isinstance(leaf, structure.Changing) else leaf
        )
    (args, kwargs), attributes = structure.unflatten(arguments, [*state, *tensors])
    for tensor, own in zip(tensors, attributes, strict=False):  # further tensors are in attributes
        vars(tensor).update(own)
    return args, kwargs


def put_on(tensor: torch.Tensor) -> dict[str, Any]:
    """The attributes that Python code has set on a plain or traced tensor."""
    own = vars(tensor) if type(tensor) in _KINDS else {}
    return {name: value for name, value in own.items() if name != _PYTORCH} if own else own


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user's code has hooks on the gradient of the tensor."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def refuse_marks(
    given: Sequence[torch.Tensor],
    before: Sequence[Mapping[str, Any]],
    results: Sequence[torch.Tensor],
    named: Collection[str],
) -> None:
    """Raise ``CaptureError`` if the forward pass leaves attributes or hooks on tensors: if traced tensors that were
    ``given`` have others than ``before``, or a result has some. Planned calls would not leave them. Marks for
    compilers do not matter, unless the user's code has ``named`` them."""
    if any(map(has_hooks, given)):
        raise CaptureError(
            "the forward pass registers a hook on a parameter, a buffer or an argument, which stays there and is called for "
            "gradients of other calls, too. Register it once, outside of the forward pass, or on a view "
            "(weight.view_as(weight)), or run the model under lowtide.online."
        )
    unseen, known = _COMPILERS.difference(named), set(map(id, given))

    def marks(attributes: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in attributes.items() if name not in unseen}

    same = all(
        was.keys() == own.keys() and all(was[name] is own[name] for name in own)
        for was, own in zip(map(marks, before), (marks(put_on(tensor)) for tensor in given), strict=True)
    )
    if not same or any(marks(put_on(tensor)) for tensor in results if id(tensor) not in known):
        raise CaptureError(
            "the forward pass gives attributes to a parameter, a buffer, an argument or a result (weight.seen = True), which "
            "planned calls would not. Keep them in attributes of the module, or return them, or run the model under "
            "lowtide.online."
        )
