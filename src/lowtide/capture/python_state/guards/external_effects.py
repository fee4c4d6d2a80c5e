"""What a pass keeps outside of the model: in global variables, in class attributes, in lists, dictionaries and objects that the
code of its modules, or a forward hook of a submodule, can name, or that are among its arguments.

A planned call runs none of that code, so what is kept there would be missing, and what was put there while the model was traced
are no tensors that the user could use. Only what is constant is no loss: a table that the first call puts into a cache is put
there while it is traced, with its values. Attributes of the model itself are another matter, see ``attribute_effects``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import operator
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch._library.custom_ops import CustomOpDef

from lowtide.capture.python_state.code.code_names import codes, full_name, is_trusted, named_by, parts_of
from lowtide.capture.python_state.code.installed import is_standard
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.walk import ABSENT, OWN_GENERATORS, PLAIN, cell_value, is_open, refill

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 5  # of containers, objects and functions in each other
# Not what fills itself.
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
_CODE = (types.FunctionType, types.MethodType, functools.partial, type)
ARGUMENT = "an argument"
Constant = Callable[[torch.Tensor], torch.Tensor | None]
_STORES_GLOBAL, _STORES_OUTSIDE = dis.opmap["STORE_GLOBAL"], dis.opmap["STORE_DEREF"]


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """All forward and backward hooks of a module, with whether they take keyword arguments, and a forward method of its own:
    where plans run in its place, that one."""
    own = module.__dict__
    forward: Any = own.get("forward")
    while getattr(type(forward), "_lowtide_runtime", False):
        forward = forward.original_forward if forward.had_instance_forward else None
    filled = [(own[name], own.get(f"{name}_with_kwargs", ())) for name in HOOKS if own[name]]
    return (*(part for hooks, flags in filled for key, hook in hooks.items() for part in (hook, key in flags)), forward)


def hooks_in(model: nn.Module) -> list[tuple[Any, ...]]:
    """Those of each of its modules."""
    return [hooks_of(module) for module in model.modules()]


WHAT_TO_DO = (
    "Where its first call does so alone, call the model once before it is rematerialized; otherwise do it outside of the "
    "forward pass, or run the model under lowtide.online."
)


@contextlib.contextmanager
def hooks_kept(model: nn.Module) -> Iterator[None]:
    """Raises ``CaptureError`` where code inside adds or removes hooks of the ``model``: a hook's handle knows the module it was
    made for, and no copy. The hooks are then what they were."""
    before = [(each.__dict__[name], copy.copy(each.__dict__[name])) for each in model.modules() for name in HOOKS]
    changed = []
    try:
        yield
    finally:
        changed += [(hooks, then) for hooks, then in before if [*hooks.items()] != [*then.items()]]
        for hooks, then in changed:
            refill(hooks, then)
    if changed:
        raise CaptureError(
            f"the forward pass removes hooks of its modules, or adds some, which planned calls would not do. {WHAT_TO_DO}"
        )


class _Holder(NamedTuple):
    """What a pass may write: a container, the attributes of an object or a class, a variable. ``read`` gives a copy of what it
    holds, ``then`` is what that was; ``live`` is what the copy is of, if there is such. ``keyed``: its ``name`` goes on with
    that of what changed."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    then: Any
    live: Any = None
    keyed: bool = False
    of_object: bool = False

    @property
    def is_as_then(self) -> bool:
        """Whether it holds the same objects, in the same order."""
        now = self.read() if self.live is None else self.live
        return len(now) == len(self.then) and (not now or all(map(operator.is_, _items(now), _items(self.then))))

    def added(self, now: Any) -> list[Any]:
        """What was not there, or not there under this key."""
        if isinstance(now, dict):
            return [value for key, value in now.items() if self.then.get(key, ABSENT) is not value]
        known = {*map(id, self.then)}
        return [item for item in now if id(item) not in known]

    def has_other_values(self, now: Any) -> bool:
        """Whether there are more than were there, or, of an object, plain ones instead of others: a new one may be a cached
        property. What was taken out (``batch.pop("labels")``) is of no consequence."""
        if not self.of_object:
            return bool(self.added(now)) or len(now) > len(self.then)
        return any(
            isinstance(value, PLAIN) and key in self.then and value != self.then[key] for key, value in now.items()
        )

    def changed(self, now: Any) -> str:
        """The name of what changed."""
        if not self.keyed:
            return self.name
        keys = {**self.then, **now}
        return f"{self.name}.{next(k for k in keys if self.then.get(k, ABSENT) is not now.get(k, ABSENT))}"


class Reach:
    """What code can write: variables, and the containers, objects and classes that it can name. ``inside``: ids of objects that
    are looked after elsewhere. ``generators``: of numbers, that it can draw from."""

    def __init__(self, inside: Iterable[int] = ()) -> None:
        self._inside = {*inside}
        self._holders: dict[Any, _Holder] = {}
        self._seen: dict[int, int] = {}
        self.generators: list[Any] = []

    def add(self, value: Any, name: str) -> None:
        """With what ``value``, a function say, can name."""
        self._collect(value, _DEPTH + 1, name)

    def as_now(self) -> Reach:
        """The same places, with what they hold now, and what can be written there."""
        changed = dict(self._changed())
        if not changed:
            return self
        other = Reach(self._inside)
        other._holders = self._holders | {key: one._replace(then=one.read()) for key, one in changed.items()}
        other._seen = dict(self._seen)
        for one in changed.values():
            for item in one.added(one.read()):
                if not isinstance(item, torch.Tensor):
                    other._collect(item, self._seen.get(id(one.live), _DEPTH) - 1, one.name)
        return other

    def changed(self) -> list[str]:
        """The names of what holds something else than when it was added."""
        return [holder.changed(now) for holder, now in self._changes()]

    def put_back(self) -> None:
        for holder, _ in self._changes():
            holder.write(holder.then)

    def _changes(self) -> Iterator[tuple[_Holder, Any]]:
        return ((holder, holder.read()) for _, holder in self._changed())

    def _changed(self) -> list[tuple[Any, _Holder]]:
        """What holds other objects, by key. Most are attributes of functions, which have none: those are left out first."""
        holders = self._holders.items()
        filled = [(key, one) for key, one in holders if one.live is None or one.then or len(one.live)]
        return [(key, one) for key, one in filled if not one.is_as_then]

    def _collect(self, value: Any, depth: int, name: str) -> None:
        if depth == 0 or id(value) in self._inside or self._seen.get(id(value), 0) >= depth:
            return
        drawing = value.__self__ if isinstance(value, types.MethodType) else value
        if isinstance(drawing, OWN_GENERATORS):
            self.generators.append(drawing)
        elif isinstance(value, types.BuiltinMethodType):  # the append of a list
            self._collect(value.__self__, depth - 1, name)
        elif isinstance(value, types.MethodType) and isinstance(value.__self__, type):  # apply, of an autograd function
            self._collect(value.__self__, depth - 1, full_name(value.__self__))
        elif isinstance(value, CustomOpDef):
            self._collect(value._init_fn, depth - 1, name)
        elif isinstance(value, _CODE):
            self._seen[id(value)] = depth
            if not is_trusted(value):
                self._collect_code(value, depth, name)
        elif type(value) in _CONTAINERS:
            self._hold(value, depth, name)
        elif isinstance(value, tuple):  # which nobody can write, unlike what is in it
            for item in value:
                self._collect(item, depth - 1, name)
        elif isinstance(value, threading.Thread):
            return  # its state is its own to change, at any time
        elif isinstance(value, (nn.Module, types.SimpleNamespace)) or (
            not is_standard(type(value).__module__) and is_open(value)
        ):
            own = getattr(value, "__dict__", None)
            if type(own) is dict:
                self._hold(own, depth, name, of_object=True)

    def _collect_code(self, value: Any, depth: int, name: str) -> None:
        if isinstance(value, type):
            write = functools.partial(_set_attributes, value)
            self._note(id(value), name, lambda: dict(vars(value)), write, live=vars(value), keyed=True)
            for attribute, member in [*vars(value).items()]:
                for part in parts_of(member):
                    self._collect(part, depth, f"{name}.{attribute}")
            return
        if isinstance(value, types.FunctionType):
            self._hold(value.__dict__, depth, name)
            for code in codes(value.__code__):
                if _STORES_GLOBAL in code.co_code[::2]:
                    for variable in code.co_names:
                        self._note_variable(value.__globals__, variable)
            if _STORES_OUTSIDE in value.__code__.co_code[::2]:
                for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                    self._note_cell(cell, f"{full_name(value)}.{variable}")
        for label, named in named_by(value):
            self._collect(named, depth - 1, label or name)

    def _note_variable(self, variables: dict[str, Any], name: str) -> None:
        def read() -> dict[str, Any]:
            return {name: variables[name]} if name in variables else {}

        def write(value: dict[str, Any]) -> None:
            variables.pop(name, None)
            variables.update(value)

        self._note((id(variables), name), str(variables.get("__name__")), read, write, keyed=True)

    def _note_cell(self, cell: types.CellType, name: str) -> None:
        """A variable of the function around the code."""

        def read() -> list[Any]:
            return [cell_value(cell)]

        def write(value: list[Any]) -> None:
            cell.cell_contents = value[0]

        self._note(id(cell), name, read, write)

    def _note(self, key: Any, name: str, read: Callable[[], Any], write: Callable[[Any], None], **more: Any) -> None:
        if key not in self._holders:
            self._holders[key] = _Holder(name, read, write, read(), **more)

    def _hold(self, own: Any, depth: int, name: str, of_object: bool = False) -> None:
        read, write = functools.partial(copy.copy, own), functools.partial(refill, own)
        self._note(id(own), name, read, write, live=own, of_object=of_object)
        if self._seen.get(id(own), 0) < depth:
            self._seen[id(own)] = depth
            for item in _items(own):
                if not isinstance(item, torch.Tensor):
                    self._collect(item, depth - 1, name)


class ExternalEffects(Reach):
    """Inside, ``model`` runs; afterwards what its hooks can reach outside of it is as it was, and so is what its code can reach
    where that put tensors. ``lost`` names these places, ``filled`` are those where constants stay. ``arguments``: all that it
    is called with.

    ``constant`` gives real tensors for traced ones that are constant: where the code put such ones alone, the real ones stay
    there. What else the code keeps is left, too: a library may have been imported meanwhile, whose state is in more places than
    these.
    """

    def __init__(self, model: nn.Module, arguments: Iterable[Any], constant: Constant | None = None) -> None:
        super().__init__(map(id, model.modules()))
        self._constant = constant
        self.filled: list[_Holder] = []
        self.lost: list[str] = []
        for module in [*model.modules()][1:]:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if not is_trusted(hook):
                    self.add(hook, full_name(hook))
        for argument in arguments:
            self.add(argument, ARGUMENT)
        for module in model.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, (*_CODE, types.BuiltinMethodType)):
                    self.add(value, f"{full_name(type(module))}.{name}")
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            self.add(kind, full_name(kind))

    def __enter__(self) -> ExternalEffects:
        return self

    def __exit__(self, *error: object) -> None:
        for holder, now in self._changes():
            left = self._left(holder, now)
            if left is None:
                holder.write(holder.then)
            elif left:
                holder.write(_exchanged(now, left))
                self.filled.append(holder)

    def forget_arguments(self) -> None:
        """What is in them is let go of."""
        self._holders = {key: one for key, one in self._holders.items() if one.name != ARGUMENT}

    def undo(self) -> None:
        """Take away what was left, too."""
        for holder in self.filled:
            holder.write(holder.then)

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

    def _left(self, holder: _Holder, now: Any) -> dict[int, Any] | None:
        """Instead of what was added with tensors in it, by its id, the same with real ones; ``None`` where it must go."""
        left = {}
        constant = None if holder.name == ARGUMENT else self._constant
        must_go = holder.name == ARGUMENT and holder.has_other_values(now)
        for item in holder.added(now):
            traced, tree = structure.flatten(item)
            real = [constant(tensor) if constant else None for tensor in traced]
            must_go = must_go or any(tensor is None for tensor in real)
            if traced and not must_go:
                left[id(item)] = structure.unflatten(tree, real)
        if must_go and holder.changed(now) not in self.lost:
            self.lost.append(holder.changed(now))
        return None if must_go else left


def _exchanged(held: Any, others: dict[int, Any]) -> Any:
    items = [others.get(id(item), item) for item in _items(held)]
    return dict(zip(held, items, strict=True)) if isinstance(held, dict) else items


def _set_attributes(kind: type, wanted: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in {**now, **wanted}:
        if name not in wanted:
            delattr(kind, name)
        elif now.get(name, ABSENT) is not wanted[name]:
            setattr(kind, name, wanted[name])


def _items(holder: Any) -> list[Any]:
    if isinstance(holder, set):  # a copy may have them in another order
        return sorted(holder, key=id)
    return list(holder.values() if isinstance(holder, (dict, types.MappingProxyType)) else holder)
