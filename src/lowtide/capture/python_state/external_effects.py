"""What a pass keeps outside of the model: in global variables, in class attributes, in lists, dictionaries and objects that the
code of its modules, or a forward hook of a submodule, can name, or that are among its arguments.

A planned call runs none of that code, so what is kept there would be missing, and what was put there while the model was traced
are no tensors that the user could use. Only what is constant is no loss: a table that the first call puts into a cache is put
there while it is traced, with its values. Attributes of the model itself are another matter, see ``capture.attributes``.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from lowtide.capture.python_state.code_names import codes, full_name, is_standard, is_trusted, named_by, parts_of
from lowtide.errors import CaptureError
from lowtide.program import structure
from lowtide.program.objects import PLAIN, is_open, refill

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 5  # of containers, objects and functions in each other
_CONTAINERS = (
    list,
    dict,
    set,
    collections.deque,
    collections.OrderedDict,
    collections.defaultdict,
)  # not what fills itself
_CODE = (types.FunctionType, types.MethodType, functools.partial, type)
ARGUMENT = "an argument"
Constant = Callable[[torch.Tensor], torch.Tensor | None]
_STORES_GLOBAL = dis.opmap["STORE_GLOBAL"]
_ABSENT = object()


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """All forward and backward hooks of a module, and a forward method of its own."""
    own = module.__dict__
    return (*(hook for name in HOOKS if own[name] for hook in own[name].values()), own.get("forward"))


class _Holder(NamedTuple):
    """A container, or the attributes ``of_object``, and a copy of what it was."""

    now: Any
    then: Any
    name: str
    of_object: bool

    def added(self) -> list[Any]:
        """What was not there, or not there under this key."""
        if isinstance(self.now, dict):
            return [value for key, value in self.now.items() if self.then.get(key, _ABSENT) is not value]
        known = {*map(id, self.then)}
        return [item for item in self.now if id(item) not in known]

    def has_other_values(self) -> bool:
        """Whether there are more than were there, or, of an object, plain ones instead of others: a new one may be a cached
        property. What was taken out (``batch.pop("labels")``) is of no consequence."""
        if not self.of_object:
            return bool(self.added()) or len(self.now) > len(self.then)
        return any(
            isinstance(value, PLAIN) and key in self.then and value != self.then[key] for key, value in self.now.items()
        )


class _Change(NamedTuple):
    """``leave``: other items for some of those ``added``, by their ids; ``restore``: what was there before. ``lost``: also
    without tensors it is missing where it is not made; ``hook``: it is a hook's."""

    name: str
    added: list[Any]
    leave: Callable[[dict[int, Any]], None]
    restore: Callable[[], None]
    lost: bool = False
    hook: bool = False

    @classmethod
    def of(cls, name: str, put: Callable[[Any], None], now: Any, then: Any) -> _Change:
        """Of a variable that is ``now``, and was ``then``."""
        return cls(name, [now], lambda left: put(left[id(now)]), functools.partial(put, then))


class ExternalEffects:
    """Inside, ``model`` runs; afterwards what its hooks can reach outside of it is as it was, and so is what its code can reach
    where that put tensors. ``lost`` names these places. ``arguments``: all that it is called with.

    ``constant`` gives real tensors for traced ones that are constant: where the code put such ones alone, the real ones stay
    there. What else the code keeps is left, too: a library may have been imported meanwhile, whose state is in more places than
    these.
    """

    def __init__(self, model: nn.Module, arguments: Iterable[Any], constant: Constant | None = None) -> None:
        self._constant = constant
        self._inside = set(map(id, model.modules()))
        self._holders: dict[int, _Holder] = {}
        self._variables: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._seen: dict[int, int] = {}
        self._filled: list[_Change] = []
        self.lost: list[str] = []
        for module in [*model.modules()][1:]:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if not is_trusted(hook):
                    self._collect(hook, _DEPTH + 1, full_name(hook))
        self._of_hooks = {*self._holders}
        for argument in arguments:
            self._collect(argument, _DEPTH + 1, ARGUMENT)
        for module in model.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, (types.FunctionType, types.BuiltinMethodType, functools.partial)):
                    self._collect(value, _DEPTH + 1, f"{full_name(type(module))}.{name}")
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            self._collect(kind, _DEPTH + 1, full_name(kind))

    def __enter__(self) -> ExternalEffects:
        return self

    def __exit__(self, *error: object) -> None:
        for change in self._changes():
            left = self._left(change)
            if left is None or change.hook:
                change.restore()
            elif left:
                change.leave(left)
                self._filled.append(change)

    def undo(self) -> None:
        """Take away what was left, too."""
        for change in self._filled:
            change.restore()

    def refuse(self) -> NoReturn:
        """Raises ``CaptureError`` for what is ``lost``."""
        if ARGUMENT in self.lost:
            raise CaptureError(
                "the forward pass adds to a list, a dict or an object among its arguments, or counts in it, which planned "
                "calls would not do. Return what it adds instead, or run the model under lowtide.online."
            )
        raise CaptureError(
            f"the forward pass, or a hook of a submodule, keeps tensors outside of the model ({', '.join(self.lost)}), where "
            "planned calls would not put them. Return them from forward, keep them in an attribute of the module "
            "(module.kept = output), remove the hook, or run the model under lowtide.online. Where only the first call keeps "
            "something (a cache that depends on parameters or buffers), call the model once before it is rematerialized."
        )

    def _changes(self) -> Iterator[_Change]:
        for key, holder in self._holders.items():
            now, then = holder.now, holder.then
            if [*map(id, _items(now))] != [*map(id, _items(then))]:
                leave, restore = functools.partial(_exchange, now), functools.partial(refill, now, then)
                lost = holder.name == ARGUMENT and holder.has_other_values()
                yield _Change(holder.name, holder.added(), leave, restore, lost, key in self._of_hooks)
        for variables, name, then in self._variables.values():
            now = variables.get(name, _ABSENT)
            if now is not then:
                yield _Change.of(
                    f"{variables.get('__name__')}.{name}", functools.partial(_put, variables, name), now, then
                )
        for kind, attributes in self._classes.items():
            for name, now in [*vars(kind).items()]:
                then = attributes.get(name, _ABSENT)
                if now is not then:
                    yield _Change.of(f"{full_name(kind)}.{name}", functools.partial(_set, kind, name), now, then)

    def _left(self, change: _Change) -> dict[int, Any] | None:
        """Instead of what was added with tensors in it, by its id, the same with real ones; ``None`` where it must go."""
        left = {}
        constant = None if change.name == ARGUMENT else self._constant
        must_go = change.lost
        for item in change.added:
            traced, tree = structure.flatten(item)
            real = [constant(tensor) if constant else None for tensor in traced]
            must_go = must_go or any(tensor is None for tensor in real)
            if traced and not must_go:
                left[id(item)] = structure.unflatten(tree, real)
        if must_go and change.name not in self.lost:
            self.lost.append(change.name)
        return None if must_go else left

    def _collect(self, value: Any, depth: int, name: str) -> None:
        if depth == 0 or id(value) in self._inside or self._seen.get(id(value), 0) >= depth:
            return
        if isinstance(value, types.BuiltinMethodType):  # the append of a list
            self._collect(value.__self__, depth - 1, name)
        elif isinstance(value, _CODE):
            self._seen[id(value)] = depth
            if not is_trusted(value):
                self._collect_code(value, depth, name)
        elif type(value) in _CONTAINERS:
            self._hold(value, depth, name)
        elif isinstance(value, (nn.Module, types.SimpleNamespace)) or (
            not is_standard(type(value).__module__) and is_open(value)
        ):
            own = getattr(value, "__dict__", None)
            if type(own) is dict:
                self._hold(own, depth, name, of_object=True)

    def _collect_code(self, value: Any, depth: int, name: str) -> None:
        if isinstance(value, type):
            self._classes.setdefault(value, dict(vars(value)))
            for attribute, member in [*vars(value).items()]:
                for part in parts_of(member):
                    self._collect(part, depth, f"{name}.{attribute}")
            return
        if isinstance(value, types.FunctionType):
            self._hold(value.__dict__, depth, name)
            for code in codes(value.__code__):
                if _STORES_GLOBAL in code.co_code[::2]:
                    for variable in code.co_names:
                        now = value.__globals__.get(variable, _ABSENT)
                        self._variables.setdefault(
                            (id(value.__globals__), variable), (value.__globals__, variable, now)
                        )
        for label, named in named_by(value):
            self._collect(named, depth - 1, label or name)

    def _hold(self, own: Any, depth: int, name: str, of_object: bool = False) -> None:
        if id(own) not in self._holders:
            self._holders[id(own)] = _Holder(own, copy.copy(own), name, of_object)
        if self._seen.get(id(own), 0) < depth:
            self._seen[id(own)] = depth
            for item in _items(own):
                if not isinstance(item, torch.Tensor):
                    self._collect(item, depth - 1, name)


def _exchange(holder: Any, others: dict[int, Any]) -> None:
    items = [others.get(id(item), item) for item in _items(holder)]
    refill(holder, dict(zip(holder, items, strict=True)) if isinstance(holder, dict) else items)


def _put(variables: dict[str, Any], name: str, value: Any) -> None:
    variables.pop(name, None)
    variables.update({} if value is _ABSENT else {name: value})


def _set(kind: type, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)
