"""Where an owner has something, and what it has there: attributes, variables, parts of containers."""

from __future__ import annotations

import functools
import itertools
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.objects.walk import ABSENT, OWN, cell_value, class_attribute, own_attributes


def part_name(holder: Any, index: int) -> str:
    """How code would name a part of a holder's content."""
    if isinstance(holder, (defaultdict, deque)):
        if index == 0:
            return ".default_factory" if isinstance(holder, defaultdict) else ".maxlen"
        index -= 1
    if isinstance(holder, (dict, types.MappingProxyType)):
        return f"[{[*holder, *holder][index]!r}]"
    if isinstance(holder, types.SimpleNamespace):
        return f".{[*vars(holder), *vars(holder)][index]}"
    return f"[{index}]" if isinstance(holder, (list, tuple, deque)) else ""


def key_of(holder: Any, index: int) -> Any:
    """Under which key ``part`` finds an item of a holder's content; ``ABSENT`` where it finds none."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    index -= isinstance(holder, defaultdict)
    if isinstance(holder, dict):
        return [*holder.keys()][index - len(holder)] if index >= len(holder) else ABSENT
    return index if isinstance(holder, (list, tuple)) else ABSENT


def index_of(holder: Any, key: Any) -> int:
    """At which index of its content a holder has what ``part`` finds under a key that it has."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    if not isinstance(holder, dict):
        return int(key)
    return isinstance(holder, defaultdict) + len(holder) + [*holder.keys()].index(key)


def part(holder: Any, key: Any) -> Any:
    """What a dictionary, a list, a tuple or a namespace has under a key; ``ABSENT`` where it has nothing."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    if isinstance(holder, dict):
        return dict.get(holder, key, ABSENT)
    kind: Any = next((kind for kind in (list, tuple) if isinstance(holder, kind)), None)
    return ABSENT if kind is None or key >= kind.__len__(holder) else kind.__getitem__(holder, key)


def _names(owner: Any) -> Iterable[str]:
    if isinstance(owner, type):
        return (name for name in vars(owner) if name != "__slotnames__")  # which copying puts there
    if isinstance(owner, nn.Module):  # a plan stands under the name of its forward pass
        return (name for name in vars(owner) if name not in OWN and name != "forward")
    return own_attributes(owner) or ()


def _attribute(owner: Any, name: str) -> Any:
    own = own_attributes(owner)
    return ABSENT if own is None else own.get(name, ABSENT)


def _slot(owner: Any, name: str) -> Any:
    try:
        return object.__getattribute__(owner, name)
    except AttributeError:
        return ABSENT


def _method(owner: Any, name: str) -> Any:
    """Sharding puts a class of its own before the user's."""
    for base in type(owner).__mro__:
        if name in vars(base) and not base.__module__.startswith("torch.distributed."):
            return vars(base)[name]
    return ABSENT


def _layout(tensor: torch.Tensor, _: str) -> str:
    with torch._C.DisableTorchFunction():  # while a model is traced, modes look at what its code asks
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return str((tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad))


def _values(tensor: torch.Tensor) -> Any:
    """Its bytes, in order, also while it is traced; of one that has no such (sparse, quantized), how often it was written in
    place."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor._version
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return plain.view(torch.uint8).numpy().tobytes()


# How an ``owner`` has something under a ``name``: what gives it, ``ABSENT`` where nothing is.
READERS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": _attribute,  # in the dictionary of an object
    "slot": _slot,  # in a slot of its class
    "class": class_attribute,  # in a class or its bases
    "type": lambda owner, _: type(owner),  # the class of an object
    "method": _method,  # in that or its bases
    "names": lambda owner, _: tuple(_names(owner)),  # of all its attributes
    "item": lambda owner, name: owner.get(name, ABSENT),  # in a namespace
    "argument": lambda owner, name: owner.get(name, ABSENT),  # among the values of a call
    "place": lambda owner, number: next(itertools.islice(owner.values(), int(number), None), ABSENT),  # in a dictionary
    "held": part,  # by a dictionary, a list or a namespace
    "part": lambda owner, way: part(*innermost(owner, way)),  # of what it has, by a way of a kind, a name and keys
    "computed": lambda function, terms: _computed(function, terms),  # by a function of what there is elsewhere
    "cell": lambda owner, _: cell_value(owner),  # in a cell of a closure
    "made of": getattr,  # what a function or a class is made of
    "answer": lambda owner, _: owner(),  # what it says when it is called
    "subclasses": lambda owner, _: tuple(type.__subclasses__(owner)),  # of a class
    "layout": _layout,  # of a tensor
    "values": lambda tensor, _: _values(tensor),  # of a tensor
    "gradient": lambda owner, _: owner.grad,  # of a tensor
}


def _computed(function: Callable[..., Any], terms: Iterable[Callable[[], Any]]) -> Any:
    try:
        return function(*(term() for term in terms))
    except (ArithmeticError, TypeError):  # there are no numbers any more
        return ABSENT


def current(kind: str, owner: Any, name: Any) -> Any:
    """What there is now where ``owner`` has something under ``name``, see ``READERS``."""
    return READERS[kind](owner, name)


def innermost(owner: Any, way: tuple[Any, ...]) -> tuple[Any, Any]:
    """The holder at the end of the way to a ``part``, and the key that it has this under."""
    kind, name, *keys, last = way
    return functools.reduce(part, keys, current(kind, owner, name)), last
