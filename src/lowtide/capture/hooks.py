"""What forward hooks of submodules keep of a pass: lists, dictionaries and objects that they can reach.

A planned call does not run them, so what they collect would be missing, and what they collected while the model was traced
are no tensors that the user could use. Attributes of the model itself are another matter, see ``capture.attributes``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.capture import structure

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_DEPTH = 3  # of containers and objects in each other
_TRUSTED = (__name__.partition(".")[0] + ".", "torch.")  # whose hooks know what they do


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """All forward and backward hooks of a module, and a forward method of its own."""
    own = module.__dict__
    return (*(hook for name in _HOOKS if own[name] for hook in own[name].values()), own.get("forward"))


class Reached:
    """Inside, hooks of submodules of ``model`` run; afterwards all that they can reach is as it was, and ``tensors`` tells
    whether they put some there."""

    def __init__(self, model: nn.Module) -> None:
        holders: dict[int, Any] = {}
        inside = set(map(id, model.modules()))
        for module in [*model.modules()][1:]:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                for value in _named_by(hook):
                    _collect(value, holders, inside, _DEPTH)
        self.before = [(holder, copy.copy(holder)) for holder in holders.values()]
        self.tensors = False

    def __enter__(self) -> Reached:
        return self

    def __exit__(self, *error: object) -> None:
        changed = [(now, then) for now, then in self.before if [*map(id, _items(now))] != [*map(id, _items(then))]]
        known = {id(item) for _, then in changed for item in _items(then)}
        added = [item for now, _ in changed for item in _items(now) if id(item) not in known]
        self.tensors = any(structure.flatten(item)[0] for item in added)
        for now, then in changed:
            structure.refill(now, then)


def is_trusted(hook: Any) -> bool:
    """Whether it is a hook of PyTorch's or of this project's own."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).startswith(_TRUSTED)


def _named_by(hook: Any) -> Iterator[Any]:
    """The values that a function can name."""
    if is_trusted(hook):
        return
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _named_by(hook.func)
    elif isinstance(hook, types.MethodType):
        yield hook.__self__
        yield from _named_by(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        for cell in hook.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)
        yield from hook.__defaults__ or ()
    else:
        yield hook


def _collect(value: Any, holders: dict[int, Any], inside: Collection[int], depth: int) -> None:
    if depth == 0 or id(value) in inside:
        return
    if isinstance(value, types.FunctionType):  # one that the hook calls
        for named in _named_by(value):
            _collect(named, holders, inside, depth - 1)
        return
    mutable = isinstance(value, structure.MUTABLE)
    if not (mutable or isinstance(value, nn.Module) or structure.is_open(value)):
        return
    own = value if mutable else getattr(value, "__dict__", None)
    if own is None or id(own) in holders:
        return
    holders[id(own)] = own
    for item in _items(own):
        if not isinstance(item, torch.Tensor):
            _collect(item, holders, inside, depth - 1)


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)
