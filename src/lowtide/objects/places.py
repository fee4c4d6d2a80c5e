"""Read a value from its place: an owner, a kind (attribute, variable, part of a container ...) and a name."""

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
    """The source form of an item of a holder's content, such as ``[0]`` or ``['key']``, for messages."""
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
    """The key under which ``part`` finds the item at ``index`` of a holder's content, or ``ABSENT``."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    index -= isinstance(holder, defaultdict)
    if isinstance(holder, dict):
        return [*holder.keys()][index - len(holder)] if index >= len(holder) else ABSENT
    return index if isinstance(holder, (list, tuple)) else ABSENT


def index_of(holder: Any, key: Any) -> int:
    """The index, in a holder's content, of the item that ``part`` finds under an existing ``key``. Inverse of ``key_of``."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    if not isinstance(holder, dict):
        return int(key)
    return isinstance(holder, defaultdict) + len(holder) + [*holder.keys()].index(key)


def part(holder: Any, key: Any) -> Any:
    """The item of a dictionary, list, tuple or namespace under ``key``, or ``ABSENT``."""
    if isinstance(holder, types.SimpleNamespace):
        holder = vars(holder)
    if isinstance(holder, dict):
        return dict.get(holder, key, ABSENT)
    kind: Any = next((kind for kind in (list, tuple) if isinstance(holder, kind)), None)
    return ABSENT if kind is None or key >= kind.__len__(holder) else kind.__getitem__(holder, key)


def _names(owner: Any) -> Iterable[str]:
    if isinstance(owner, type):
        return (name for name in vars(owner) if name != "__slotnames__")  # added by copying
    if isinstance(owner, nn.Module):  # ``forward`` may be a planned forward
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
    """The class attribute ``name``, ignoring the class that FSDP2 inserts before the user's in the MRO."""
    for base in type(owner).__mro__:
        if name in vars(base) and not base.__module__.startswith("torch.distributed."):
            return vars(base)[name]
    return ABSENT


def _layout(tensor: torch.Tensor, _: str) -> str:
    with torch._C.DisableTorchFunction():  # while a model is traced, modes intercept attribute reads of tensors
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        return str((tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad))


def _values(tensor: torch.Tensor) -> Any:
    """A tensor's bytes, also during tracing; for one that is sparse, quantized or nested, its version counter (how often it was
    written in place)."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return tensor._version
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
        return plain.view(torch.uint8).numpy().tobytes()


# By kind: the function that reads the value of an ``owner`` under a ``name``, and gives ``ABSENT`` if there is none.
READERS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": _attribute,  # in an object's ``__dict__``
    "slot": _slot,  # in a slot of an object
    "class": class_attribute,  # in a class or its bases
    "type": lambda owner, _: type(owner),  # the class of an object
    "method": _method,  # in the class of an object or its bases
    "names": lambda owner, _: tuple(_names(owner)),  # the names of all attributes
    "item": lambda owner, name: owner.get(name, ABSENT),  # in a namespace (a dictionary of variables)
    "argument": lambda owner, name: owner.get(name, ABSENT),  # among the changing arguments of a call
    "place": lambda owner, number: next(itertools.islice(owner.values(), int(number), None), ABSENT),  # n-th of a dict
    "held": part,  # by a dictionary, a list or a namespace
    "part": lambda owner, way: part(*innermost(owner, way)),  # nested in a value; the way is a kind, a name, then keys
    "computed": lambda function, terms: _computed(function, terms),  # a function of values at other places
    "cell": lambda owner, _: cell_value(owner),  # in a cell of a closure
    "made of": getattr,  # an attribute that makes up a function or class, such as ``__code__``
    "answer": lambda owner, _: owner(),  # the result of calling it
    "subclasses": lambda owner, _: tuple(type.__subclasses__(owner)),  # of a class
    "layout": _layout,  # of a tensor
    "values": lambda tensor, _: _values(tensor),  # of a tensor
    "gradient": lambda owner, _: owner.grad,  # of a tensor
}


def _computed(function: Callable[..., Any], terms: Iterable[Callable[[], Any]]) -> Any:
    try:
        return function(*(term() for term in terms))
    except (ArithmeticError, TypeError):  # the terms are no longer numbers
        return ABSENT


def current(kind: str, owner: Any, name: Any) -> Any:
    """The current value at a place: of ``owner`` under ``name``, read by the function for ``kind`` in ``READERS``."""
    return READERS[kind](owner, name)


def innermost(owner: Any, way: tuple[Any, ...]) -> tuple[Any, Any]:
    """The innermost holder on the way to a ``part``, and the part's key in it."""
    kind, name, *keys, last = way
    return functools.reduce(part, keys, current(kind, owner, name)), last
