"""Plain attributes of modules that a forward pass writes.

A planned call does not run the model's Python, so what that leaves in attributes must be known. Ordinary models leave
nothing. For the others the forward pass is rehearsed, on fake tensors, twice in a row on one copy of the model:

=====================================================  ==========================================================
an attribute                                           is
=====================================================  ==========================================================
that gets tensors in every call (an auxiliary loss)    a result of the program, written after every planned call
that gets tensors in the first call (a cached mask)    made in every call instead, where it depends on nothing
that gets other values in every call (a counter)       left as it is, said in the log, where no operator depends on it
that gets other values in the first call               left as it is
=====================================================  ==========================================================

A program that is another one in the second call, because of what the first one left behind, is refused: its state belongs
into buffers, which are followed, or its first call before the plan.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture import structure
from lowtide.errors import CaptureError

_LOG = logging.getLogger(__name__)
OWN = frozenset(vars(nn.Module()))  # what every module has
_CONTAINERS = (list, deque, dict)  # that can be written in place
_SHOWN = 3

Place = tuple[str, str]  # the path of a module, and the name of its attribute


class Assigned(NamedTuple):
    """An attribute that every call writes. ``anew``: a container that it empties first."""

    path: str
    name: str
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The attributes of all modules of a model, as they were; ``kept`` keeps what they were, so that no id comes again.
    ``containers``: those that can be written in place, and copies of them."""

    attributes: dict[Place, Any]
    modules: dict[str, nn.Module]
    containers: dict[Place, tuple[Any, Any]]
    kept: list[Any]


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a snapshot: places with tensors in them now, and all others."""

    tensors: tuple[Place, ...] = ()
    plain: tuple[Place, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.tensors or self.plain)


def snapshot(model: nn.Module) -> Snapshot:
    kept: list[Any] = []
    found = dict(_attributes(model))
    attributes = {place: _identity(value, kept) for place, value in found.items()}
    containers = {p: (v, copy.copy(v)) for p, v in found.items() if isinstance(v, _CONTAINERS)}
    return Snapshot(attributes, _modules(model), containers, kept)


def changes(model: nn.Module, before: Snapshot) -> Changes:
    """Raises ``CaptureError`` where modules are others than they were."""
    now = _modules(model)
    replaced = [name for name in {**before.modules, **now} if before.modules.get(name) is not now.get(name)]
    if replaced:
        raise CaptureError(
            f"the forward pass replaces submodules of the model ({named(replaced)}), which a plan cannot follow. Where it "
            "does so in its first call only, call the model once before it is rematerialized."
        )
    kept: list[Any] = []
    found = {place: (value, _identity(value, kept)) for place, value in _attributes(model)}
    changed = [place for place, (_, key) in found.items() if before.attributes.get(place) != key]
    holding = [place for place in changed if _tensors(found[place][0])]
    return Changes(tuple(holding), tuple(place for place in changed if place not in holding))


def written(model: nn.Module, before: Snapshot, places: Sequence[Assigned]) -> list[Any]:
    """How to bring the attributes from what they were to what they are: a verb and its object, see ``write``."""
    values = [vars(model.get_submodule(place.path)).get(place.name) for place in places]
    return [
        ("refill", value) if place.anew and isinstance(value, _CONTAINERS) else _written(value, before, place[:2])
        for value, place in zip(values, places, strict=True)
    ]


def _written(value: Any, before: Snapshot, place: Place) -> tuple[str, Any]:
    container, items = before.containers.get(place, (None, None))
    if container is None or container is not value:
        return "set", value
    if isinstance(value, dict):
        same = all(key in value for key in items)
        return ("update", {k: v for k, v in value.items() if items.get(k) is not v}) if same else ("set", value)
    start = list(value)[: len(items)]
    same = len(start) == len(items) and all(map(operator.is_, start, items))
    return ("extend", list(value)[len(items) :]) if same else ("set", value)


def _emptied(container: Any, before: Any) -> bool:
    """Whether nothing is left of what was in it."""
    now, then = (item.values() if isinstance(item, dict) else item for item in (container, before))
    return bool(before) and not {*map(id, now)} & {*map(id, then)}


def write(model: nn.Module, places: Sequence[Assigned], changes: Sequence[tuple[str, Any]]) -> None:
    """Do to the attributes what the traced forward pass did: set them anew, refill, extend or update what is there."""
    for place, (verb, value) in zip(places, changes, strict=True):
        module = model.get_submodule(place.path)
        found = getattr(module, place.name, None)
        if verb == "set" or found is None:
            setattr(module, place.name, value)
        elif verb == "refill":
            found.clear()
            (found.update if isinstance(found, dict) else found.extend)(value)
        else:
            getattr(found, verb)(value)


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All tensors in plain attributes, those in containers and objects included."""
    distinct = {id(value): value for _, value in _attributes(model) if not isinstance(value, structure.PLAIN)}
    return [tensor for value in distinct.values() for tensor in _tensors(value)]


def rehearsed(calls: Sequence[Call]) -> tuple[Assigned, ...]:
    """The attributes that are results, from two calls in a row. Raises ``CaptureError``, see the module."""
    first, second = calls
    every = [place for place in first.changes.tensors if place in second.changes.tensors]
    once = [place for place in first.changes.tensors if place not in every]
    late = [place for place in second.changes.tensors if place not in every]
    read = {place for place in first.changes.tensors if first.left(place) & second.read - first.state}
    stale = [place for place in once if place in read and first.left(place) & first.depending]
    culprits = [place for place in every if place in read] + stale + late
    if culprits or second.draws != first.draws:
        raise CaptureError(
            "a later call of the model computes with what an earlier one left in plain attributes "
            f"({_texts(culprits or [*first.changes.tensors, *first.changes.plain])}), so "
            "no program holds for all calls. Keep such state in buffers (register_buffer), which are followed; where it is "
            "only prepared in the first call, call the model once before it is rematerialized; or use lowtide.online."
        )
    if not once and first.operators != second.operators:
        raise CaptureError(
            f"the program depends on attributes that its own forward pass changes ({_texts(first.changes.plain)}), so it is "
            "another one from call to call. Where that is so in the first call only, call the model once before it is "
            "rematerialized; otherwise use lowtide.online."
        )
    counted = [place for place in second.changes.plain if place in first.changes.plain]
    if counted:
        _LOG.warning(
            "the forward pass changes plain attributes (%s) in every call, which planned calls leave as they are; no operator "
            "depends on them now",
            _texts(counted),
        )
    return tuple(Assigned(*place, anew=place in second.emptied) for place in every)


class Call(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, one forward pass: what it reads, what depends on its inputs, which operators run, and what it leaves behind.

    ``state``: parameters and buffers; ``inputs``: the tensors of the call. Tensors are told apart by identity.
    """

    def __init__(self, state: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.state = set(map(id, state))
        self.depending = {*self.state, *map(id, inputs)}
        self.operators: list[Any] = []
        self.read: set[int] = set()
        self.draws = 0
        self.changes = Changes()
        self.found: dict[Place, set[int]] = {}
        self.emptied: set[Place] = set()  # containers that it did not only add to
        self.kept: list[Any] = [state, inputs]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.namespace == "prim":  # asks for a device or a layout, and reads nothing
            return result
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        random = torch.Tag.nondeterministic_seeded in function.tags
        self.draws += random
        self.read |= tensors
        self.operators.append((str(function), tuple(map(_text, leaves))))
        if random or tensors & self.depending:
            self.depending |= {id(leaf) for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        self.kept += [leaves, result]  # no id comes again
        return result

    def ended(self, model: nn.Module, before: Snapshot) -> None:
        """The call is over: note what it left in ``model``."""
        self.changes = changes(model, before)
        found = dict(_attributes(model))
        self.found = {place: set(map(id, _tensors(found[place]))) for place in self.changes.tensors}
        for place in self.changes.tensors:
            container = before.containers.get(place, (None, None))[0]
            if container is not None and container is found[place] and _emptied(container, before.containers[place][1]):
                self.emptied.add(place)

    def left(self, place: Place) -> set[int]:
        """The tensors that the call left there, by identity."""
        return self.found.get(place, set())


def _attributes(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and name != "forward":
                yield (path, name), value


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules(remove_duplicate=False))


def _identity(value: Any, kept: list[Any]) -> Any:
    """Equal for what is the same: values of plain types, the very same objects, and containers of such."""
    if isinstance(value, structure.PLAIN):
        return type(value), repr(value)
    if isinstance(value, (list, tuple, set, deque)):
        return type(value), tuple(_identity(item, kept) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((repr(key), _identity(item, kept)) for key, item in value.items())
    kept.append(value)
    return id(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return structure.flatten(value)[0]


def _text(leaf: Any) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)


def _texts(places: Sequence[Place]) -> str:
    return named([f"{path}.{name}" if path else name for path, name in places])


def named(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
