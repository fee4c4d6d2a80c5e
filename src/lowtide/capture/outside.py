"""What a pass keeps outside of the model: in global variables, in class attributes, in lists, dictionaries and objects that the
code of its modules, or a forward hook of a submodule, can name, or that are among its arguments.

A planned call runs none of that code, so what is kept there would be missing, and what was put there while the model was traced
are no tensors that the user could use. Attributes of the model itself are another matter, see ``capture.attributes``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.capture import structure

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 5  # of containers, objects and functions in each other
_TRUSTED = (__name__.partition(".")[0] + ".", "torch.")  # whose code knows what it does
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
_STORES_GLOBAL = dis.opmap["STORE_GLOBAL"]
_ABSENT = object()


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """All forward and backward hooks of a module, and a forward method of its own."""
    own = module.__dict__
    return (*(hook for name in _HOOKS if own[name] for hook in own[name].values()), own.get("forward"))


class Reached:
    """Inside, ``model`` runs; afterwards what its hooks can reach outside of it is as it was, and so is what its code can reach
    where that put tensors. ``tensors`` names these places. ``arguments``: all that it is called with.

    What else the code keeps is left: a library may have been imported meanwhile, whose state is in more places than these.
    """

    def __init__(self, model: nn.Module, arguments: Iterable[Any]) -> None:
        self._inside = set(map(id, model.modules()))
        self._holders: dict[int, tuple[Any, Any, str]] = {}
        self._variables: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self._classes: dict[type, dict[str, Any]] = {}
        self._seen: dict[int, int] = {}
        self.tensors: list[str] = []
        for module in [*model.modules()][1:]:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                if not is_trusted(hook):
                    self._collect(hook, _DEPTH + 1, _name(hook))
        self._of_hooks = {*self._holders}
        for argument in arguments:
            self._collect(argument, _DEPTH + 1, ARGUMENT)
        for module in model.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, (types.FunctionType, types.BuiltinMethodType, functools.partial)):
                    self._collect(value, _DEPTH + 1, f"{_name(type(module))}.{name}")
        for kind in {kind for module in model.modules() for kind in type(module).__mro__}:
            self._collect(kind, _DEPTH + 1, _name(kind))

    def __enter__(self) -> Reached:
        return self

    def __exit__(self, *error: object) -> None:
        for key, (now, then, name) in self._holders.items():
            items, before = _items(now), _items(then)
            if [*map(id, items)] != [*map(id, before)]:
                known = {*map(id, before)}
                if self._has_tensors(name, [item for item in items if id(item) not in known]) or key in self._of_hooks:
                    structure.refill(now, then)
        for variables, name, then in self._variables.values():
            now = variables.get(name, _ABSENT)
            if now is not then and self._has_tensors(f"{variables.get('__name__')}.{name}", [now]):
                variables.pop(name, None)
                variables.update({} if then is _ABSENT else {name: then})
        for kind, attributes in self._classes.items():
            for name, value in [*vars(kind).items()]:
                then = attributes.get(name, _ABSENT)
                if value is then or not self._has_tensors(f"{_name(kind)}.{name}", [value]):
                    continue
                if then is _ABSENT:
                    delattr(kind, name)
                else:
                    setattr(kind, name, then)

    def _has_tensors(self, name: str, added: list[Any]) -> bool:
        found = any(structure.flatten(item)[0] for item in added)
        if found and name not in self.tensors:
            self.tensors.append(name)
        return found

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
            not _is_standard(type(value).__module__) and structure.is_open(value)
        ):
            own = getattr(value, "__dict__", None)
            if type(own) is dict:
                self._hold(own, depth, name)

    def _collect_code(self, value: Any, depth: int, name: str) -> None:
        if isinstance(value, type):
            self._classes.setdefault(value, dict(vars(value)))
            for attribute, member in [*vars(value).items()]:
                for part in _parts(member):
                    self._collect(part, depth, f"{name}.{attribute}")
            return
        if isinstance(value, types.FunctionType):
            self._hold(value.__dict__, depth, name)
            for code in _codes(value.__code__):
                if _STORES_GLOBAL in code.co_code[::2]:
                    for variable in code.co_names:
                        now = value.__globals__.get(variable, _ABSENT)
                        self._variables.setdefault(
                            (id(value.__globals__), variable), (value.__globals__, variable, now)
                        )
        for label, named in _named_by(value):
            self._collect(named, depth - 1, label or name)

    def _hold(self, own: Any, depth: int, name: str) -> None:
        if id(own) not in self._holders:
            self._holders[id(own)] = (own, copy.copy(own), name)
        if self._seen.get(id(own), 0) < depth:
            self._seen[id(own)] = depth
            for item in _items(own):
                if not isinstance(item, torch.Tensor):
                    self._collect(item, depth - 1, name)


def is_trusted(hook: Any) -> bool:
    """Whether it is a hook, or other code, of PyTorch's, of Python's or of this project's own."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    module = str(getattr(function, "__module__", None) or type(function).__module__)
    return module.startswith(_TRUSTED) or module == "torch" or _is_standard(module)


def _is_standard(module: str) -> bool:
    return module != "__main__" and module.partition(".")[0] in sys.stdlib_module_names


def _named_by(value: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function can name, with the names of global ones."""
    if isinstance(value, functools.partial):
        yield from (("", item) for item in (*value.args, *value.keywords.values(), value.func))
    elif isinstance(value, types.MethodType):
        yield from (("", item) for item in (value.__self__, value.__func__))
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield "", cell.cell_contents
        variables = value.__globals__
        names = {name for code in _codes(value.__code__) for name in code.co_names if name in variables}
        yield from ((f"{variables.get('__name__')}.{name}", variables[name]) for name in names)
        yield from (("", default) for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _parts(member: Any) -> tuple[Any, ...]:
    """What there is to run, or to write to, in an attribute of a class."""
    if isinstance(member, property):
        return (member.fget,)
    return (getattr(member, "__func__", member),)


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)
