"""Plain attributes of modules that a forward pass writes.

A planned call does not run the model's Python, so it does itself to the attributes what the traced call did; the same holds
for attributes of objects that modules hold. A program is good for calls on a model that is as it was when it was captured
(``capture.guards``), so what plain values such a call writes is known. Tensors are another matter, and so is a program that
changes, by what it writes, what it depends on. So where a forward pass changes attributes it is rehearsed, on fake tensors,
twice in a row on one copy of the model:

=====================================================  ==========================================================
an attribute                                           is
=====================================================  ==========================================================
that gets a plain value (the longest length so far)    written after every planned call
that gets tensors in every call (an auxiliary loss)    a result of the program, written after every planned call
... from which the next call computes (hidden state)   an input of the program too, as a buffer is
that gets tensors in the first call (a cached mask)    a result; the next call finds it there, and is another program
that gets other values in every call (a counter)       left as it is, said in the log, where nothing depends on it
=====================================================  ==========================================================

Tensors in attributes are constants of the program unless they are ``followed``: then they are inputs, whatever they are at the
time of a call, as long as their layout stays.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import hashlib
import logging
import operator
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.capture import structure
from lowtide.errors import CaptureError

_LOG = logging.getLogger(__name__)
OWN = frozenset(vars(nn.Module()))  # what every module has
DEPTH = 3  # of objects in objects
MOST_OBJECTS = 256  # that are looked into
MOST_BYTES = 1 << 24  # of an array that is compared
_CONTAINERS = (list, deque, dict, set)  # that can be written in place
_SHOWN = 3

Place = tuple[str, str]  # the path of a module, and the name of its attribute; "name.field" of an object that it holds


class _Absent(enum.Enum):
    ABSENT = enum.auto()


ABSENT = _Absent.ABSENT  # instead of the value of an attribute that is not there


class Assigned(NamedTuple):
    """An attribute that gets tensors. ``anew``: a container that is emptied first; ``once``: in the first call alone."""

    path: str
    name: str
    anew: bool = False
    once: bool = False


class Setting(NamedTuple):
    """An attribute that gets a plain value. ``inside``: into the container that is there."""

    path: str
    name: str
    value: Any
    inside: bool


@dataclass(frozen=True, slots=True)
class Effects:
    """What a rehearsal found: attributes that get tensors, those that are ``counted`` on in every call, and those whose tensors
    are ``carried`` from call to call. ``settled``: the next call has the same program."""

    tensors: tuple[Assigned, ...] = ()
    counted: frozenset[Place] = frozenset()
    carried: frozenset[Place] = frozenset()
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Followed:
    """Tensors in attributes that are inputs. ``places[i]``: where ``tensors[i]`` is, attributes and the number of the tensor
    among those in there."""

    tensors: tuple[torch.Tensor, ...] = ()
    places: tuple[tuple[tuple[Place, int], ...], ...] = ()


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
    found = dict(_attributes(model))
    changed = {place for place, value in found.items() if before.attributes.get(place) != _identity(value, kept)}
    changed |= before.attributes.keys() - found.keys()
    places = [*found, *sorted(before.attributes.keys() - found.keys())]
    outer = [place for place in places if place in changed and not changed & set(_around(place))]
    holding = [place for place in outer if place in found and _tensors(found[place])]
    return Changes(tuple(holding), tuple(place for place in outer if place not in holding))


def settings(
    model: nn.Module, before: Snapshot, changed: Changes, assigned: Collection[Place]
) -> tuple[tuple[Setting, ...], tuple[Place, ...]]:
    """What plain values a traced call wrote, by what it ``changed`` and what it ``assigned`` (also what was there before); and
    the places with other values in them, made by the call, which are left as they were."""
    found = dict(_attributes(model))
    places = [
        *changed.plain,
        *(p for p in assigned if p in found and p not in changed.plain and p not in changed.tensors),
    ]
    values = [(place, found.get(place, ABSENT)) for place in places]
    constants = [
        Setting(*place, copy.deepcopy(value), _is_container_of(before, place, value))
        for place, value in values
        if _is_constant(value)
    ]
    return tuple(constants), tuple(p for p, value in values if not _is_constant(value) and p in changed.plain)


def _is_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_constant, [*value.keys(), *value.values()]))
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, (*structure.PLAIN, enum.Enum))


def _is_container_of(before: Snapshot, place: Place, value: Any) -> bool:
    return before.containers.get(place, (None, None))[0] is value and value is not None


def written(model: nn.Module, before: Snapshot, places: Sequence[Assigned]) -> list[Any]:
    """How to bring the attributes from what they were to what they are: a verb and its object, see ``write``."""
    values = [_value(model, place[:2]) for place in places]
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
        found = _value(model, place[:2])
        if verb == "set" or not isinstance(found, _CONTAINERS):
            _set(model, place[:2], value)
        elif verb == "refill":
            _refill(found, value)
        else:
            getattr(found, verb)(value)


def apply(model: nn.Module, wanted: Sequence[Setting]) -> None:
    """Write plain values."""
    for path, name, value, inside in wanted:
        found = _value(model, (path, name))
        if inside and isinstance(found, _CONTAINERS):
            _refill(found, copy.deepcopy(value))
        elif found is not value:
            _set(model, (path, name), copy.deepcopy(value))


def plain(model: nn.Module, places: Sequence[Place]) -> list[tuple[Place, Any]]:
    """Those with plain values now, and the values."""
    values = ((place, _value(model, place)) for place in places)
    return [(place, copy.copy(value)) for place, value in values if _is_constant(value)]


@contextlib.contextmanager
def undone(model: nn.Module, before: Sequence[tuple[Place, Any]]) -> Iterator[None]:
    """Inside, attributes are as ``plain`` found them."""
    now = [(place, _value(model, place)) for place, _ in before]
    try:
        for place, value in before:
            _set(model, place, value)
        yield
    finally:
        for place, value in now:
            _set(model, place, value)


def locate(model: nn.Module, place: Place) -> tuple[Any, str] | None:
    """The module or object whose attribute it is, and the attribute's own name; ``None`` where there is no such object now."""
    owner: Any = model.get_submodule(place[0])
    if place[1] in vars(owner):
        return owner, place[1]
    *objects, leaf = place[1].split(".")
    for name in objects:
        owner = _fields(owner).get(name)
    return None if owner is None else (owner, leaf)


def _value(model: nn.Module, place: Place) -> Any:
    located = locate(model, place)
    return ABSENT if located is None else _fields(located[0]).get(located[1], ABSENT)


def _fields(owner: Any) -> dict[str, Any]:
    return vars(owner) if isinstance(owner, nn.Module) else structure.fields(owner)


def _set(model: nn.Module, place: Place, value: Any) -> None:
    located = locate(model, place)
    if located is None:
        return
    owner, name = located
    if value is ABSENT:
        with contextlib.suppress(AttributeError):
            delattr(owner, name)
    elif isinstance(owner, nn.Module):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)


def _refill(found: Any, value: Any) -> None:
    found.clear()
    (found.update if isinstance(found, (dict, set)) else found.extend)(value)


def say_unknown(model: nn.Module, places: Sequence[Place]) -> None:
    """Log what is left as it was, but for the bookkeeping of PyTorch's own modules."""
    theirs = [place for place in places if not type(model.get_submodule(place[0])).__module__.startswith("torch.")]
    if theirs:
        _LOG.warning(
            "the forward pass writes objects or arrays in plain attributes (%s), which planned calls leave as they are",
            _texts(theirs),
        )


def held_tensors(model: nn.Module) -> list[torch.Tensor]:
    """All tensors in plain attributes, those in containers, objects and modules that are not registered included."""
    distinct = {id(value): value for _, value in _of_modules(model) if not isinstance(value, structure.PLAIN)}
    hidden = (module for value in distinct.values() for module in structure.modules(value))
    tensors = [tensor for value in distinct.values() for tensor in _tensors(value)]
    return tensors + [t for module in hidden for t in (*module.parameters(), *module.buffers())]


def holding(model: nn.Module, tensor: torch.Tensor) -> frozenset[Place]:
    """The attributes with this tensor in them."""
    return frozenset(place for place, value in _of_modules(model) if any(t is tensor for t in _tensors(value)))


def follow(model: nn.Module, places: Collection[Place], state: Sequence[torch.Tensor]) -> Followed:
    """The tensors there that are not among ``state`` already, and wherever else they are; tensors that require gradients are
    followed at all places."""
    known = set(map(id, state))
    found = [(place, index, t) for place, value in _of_modules(model) for index, t in enumerate(_tensors(value))]
    roots = {(path, name.split(".")[0]) for path, name in places}
    wanted = {id(t): t for place, _, t in found if (place in roots or t.requires_grad) and id(t) not in known}
    everywhere = (tuple((place, index) for place, index, t in found if id(t) == key) for key in wanted)
    return Followed(tuple(wanted.values()), tuple(everywhere))


def current(model: nn.Module, places: Sequence[Sequence[tuple[Place, int]]]) -> list[torch.Tensor] | None:
    """The followed tensors of now, and an empty one where the program reads none; ``None`` where they are not all there, or one
    is not the same in all its places."""
    found: dict[Place, list[torch.Tensor]] = {}
    result = []
    for everywhere in places:
        if not everywhere:
            result.append(torch.empty(0))
            continue
        for place, _ in everywhere:
            if place not in found:
                found[place] = _tensors(_value(model, place))
        tensors = [found[place][index] if index < len(found[place]) else None for place, index in everywhere]
        if tensors[0] is None or any(tensor is not tensors[0] for tensor in tensors):
            return None
        result.append(tensors[0])
    return result


def rehearsed(calls: Sequence[Call]) -> Effects:
    """What two calls in a row do to the attributes. Raises ``CaptureError``, see the module."""
    first, second = calls
    every = [place for place in first.changes.tensors if place in second.changes.tensors]
    once = [place for place in first.changes.tensors if place not in every]
    late = [place for place in second.changes.tensors if place not in every]
    carried = [place for place in every if first.left(place) & second.read - first.state]
    growing = [place for place in carried if first.layouts[place] != second.layouts[place]]
    if growing:
        raise CaptureError(
            f"every call of the model leaves other shapes in plain attributes ({_texts(growing)}) and the next one computes "
            "with them, so no program holds for all calls. Run it under lowtide.online."
        )
    counted = [place for place in second.changes.plain if place in first.changes.plain]
    constant = not any(first.left(place) & first.depending for place in once)
    same = first.draws == second.draws and (bool(once) or first.operators == second.operators)
    if counted and (late or not constant or not same):
        raise CaptureError(
            f"the program depends on attributes that its own forward pass changes ({_texts(counted)}), so it is another one "
            "from call to call. Where that is so in the first calls only, call the model before it is rematerialized; "
            "otherwise use lowtide.online."
        )
    if counted:
        _LOG.warning(
            "the forward pass changes plain attributes (%s) in every call, which planned calls leave as they are; no operator "
            "depends on them now",
            _texts(counted),
        )
    kept = every if counted else [*every, *once]  # a constant beside a counter is made in every call
    tensors = tuple(Assigned(*place, anew=place in second.emptied, once=place in once) for place in kept)
    settled = same and not once and not late and not carried
    return Effects(tensors, frozenset(counted), frozenset(carried), settled)


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
        self.layouts: dict[Place, Any] = {}
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
        for place in self.changes.tensors:
            left = _tensors(found[place])
            self.found[place] = set(map(id, left))
            self.layouts[place] = structure.layout(found[place])
            container = before.containers.get(place, (None, None))[0]
            if container is not None and container is found[place] and _emptied(container, before.containers[place][1]):
                self.emptied.add(place)

    def left(self, place: Place) -> set[int]:
        """The tensors that the call left there, by identity."""
        return self.found.get(place, set())


def _of_modules(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OWN and name != "forward":
                yield (path, name), value


def _attributes(model: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Those of modules, and of the objects that they hold; every object once."""
    seen: dict[int, Any] = {}
    for place, value in _of_modules(model):
        yield place, value
        yield from _inside(place, value, DEPTH, seen)


def _inside(place: Place, value: Any, depth: int, seen: dict[int, Any]) -> Iterator[tuple[Place, Any]]:
    if depth == 0 or len(seen) == MOST_OBJECTS or id(value) in seen or not structure.is_open(value):
        return
    seen[id(value)] = value
    for name, field in structure.fields(value).items():
        inner = (place[0], f"{place[1]}.{name}")
        yield inner, field
        yield from _inside(inner, field, depth - 1, seen)


def _around(place: Place) -> Iterator[Place]:
    """The objects that it is in."""
    parts = place[1].split(".")
    return ((place[0], ".".join(parts[:count])) for count in range(1, len(parts)))


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
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return id(value), hashlib.sha256(value.tobytes()).digest()
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
