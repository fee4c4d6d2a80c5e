"""A model's parameters and buffers."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lowtide.errors import CaptureError
from lowtide.program.distributed.local import form_of
from lowtide.program.distributed.sharded import Unit, begun, is_sharded

_PLAIN = frozenset((nn.Parameter, torch.Tensor, type(None)))
_REGISTRIES = tuple(map(operator.attrgetter, ("_parameters", "_buffers", "_modules")))
_DICTIONARIES = frozenset((dict, OrderedDict))
_IN_ORDER = operator.methodcaller("values")  # dict.values would not see that an OrderedDict was reordered


class NoShapeError(CaptureError):
    """Raised if a parameter has no shape before the model's first call (``nn.LazyLinear``)."""


@dataclass(frozen=True, slots=True)
class State:
    """A model's parameters and buffers, each once. ``names[i]``: all names of ``registered[i]``. ``tensors``: what
    operators read instead of these: gathered parameters for the shards of ``units``, local tensors for distributed
    ones, else the same tensors."""

    tensors: tuple[torch.Tensor, ...]
    names: tuple[tuple[str, ...], ...]
    parameters: int  # tensors[:parameters] are parameters, the rest buffers
    registered: tuple[torch.Tensor, ...]
    units: tuple[Unit, ...]
    modules: tuple[nn.Module, ...]  # each once, in the order of ``nn.Module.modules``


def model_state(model: nn.Module) -> State:
    """The parameters, then the buffers, in registration order, without duplicates."""
    units = begun(model)
    places: dict[int, tuple[torch.Tensor, list[str]]] = {}
    modules = named_modules(model)
    for prefix, module in modules:
        for name, tensor in module._parameters.items():
            if tensor is None:
                continue
            if is_lazy(tensor):
                raise NoShapeError(
                    f"parameter {prefix + name!r} has no shape yet: call the model once with a sample before it is "
                    "rematerialized."
                )
            places.setdefault(id(tensor), (tensor, []))[1].append(prefix + name)
    parameters = len(places)
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), (buffer, []))[1].append(prefix + name)
    registered = tuple(tensor for tensor, _ in places.values())
    forms = {id(shard): form for unit in units for shard, form in zip(unit.parameters, unit.forms, strict=True)}
    tensors = tuple(forms[id(tensor)] if id(tensor) in forms else form_of(tensor) for tensor in registered)
    names = tuple(tuple(names) for _, names in places.values())
    distinct = {id(module): module for _, module in modules}
    return State(tensors, names, parameters, registered, tuple(units), tuple(distinct.values()))


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """``named_modules(remove_duplicate=False)``, with a dot after each name. PyTorch's version nests generators, which
    would delay each call of a small model."""
    found, waiting = [], [("", model)]
    while waiting:
        found.append(waiting.pop())
        prefix, module = found[-1]
        children = [(f"{prefix}{name}.", child) for name, child in module._modules.items() if child is not None]
        waiting += reversed(children)
    return found


class StateReader:
    """``model_state`` for repeated calls of one model. If nothing has moved, the names of the previous call are used
    again, since building them takes longest. Keeps nothing alive."""

    def __init__(self) -> None:
        self._form: tuple[list[Any], ...] = ()  # sizes, names, and contents of all registries, by identity
        self._names: tuple[tuple[str, ...], ...] = ()
        self._parameters = 0
        self._repeated = False  # whether a module is in several places
        self._first: Callable[[Sequence[Any]], tuple[Any, ...]] = tuple  # picks each tensor once from the registries

    def __call__(self, model: nn.Module) -> State:
        modules = _modules(model)
        registries = [registry for read in _REGISTRIES for registry in map(read, modules)]
        sizes, filled = [*map(len, registries)], [*filter(None, registries)]
        if not _DICTIONARIES.issuperset(map(type, filled)):  # views of a compiled module (torch.jit)
            return model_state(model)
        keys: list[Any] = [*itertools.chain.from_iterable(filled)]
        held: list[Any] = [*itertools.chain.from_iterable(map(_IN_ORDER, filled))]
        if is_sharded(model) or not _PLAIN.issuperset(map(type, held[: sum(sizes[: -len(modules)])])):
            return model_state(model)  # operators read other tensors than these
        form = sizes, keys, [*map(id, held)]
        if form != self._form:
            self._learn(model, modules, held)
            self._form = form
        tensors = self._first(held)
        distinct = {id(module): module for module in modules}.values() if self._repeated else modules
        return State(tensors, self._names, self._parameters, tensors, (), tuple(distinct))

    def _learn(self, model: nn.Module, modules: Sequence[nn.Module], held: Sequence[Any]) -> None:
        state = model_state(model)
        place = {id(one): index for index, one in reversed([*enumerate(held)])}
        first = [place[id(tensor)] for tensor in state.registered]
        self._names, self._parameters, self._repeated = state.names, state.parameters, len(state.modules) < len(modules)
        self._first = operator.itemgetter(*first) if len(first) > 1 else lambda held: tuple(held[i] for i in first)


def _modules(model: nn.Module) -> list[nn.Module]:
    """The modules in the order of ``named_modules``, each as often as it occurs."""
    found, waiting = [], [model]
    while waiting:
        found.append(waiting.pop())
        children = found[-1]._modules
        if children:
            waiting += [child for child in reversed(children.values()) if child is not None]
    return found
