"""What forward hooks of submodules keep of a pass: lists, dictionaries and objects that they can reach.

A planned call does not run them, so what they collect would be missing, and what they collected while the model was traced
are no tensors that the user could use. Attributes of the model itself are another matter, see ``capture.attributes``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lowtide.capture import structure

_HOLDERS = (list, dict, deque, set)
_DEPTH = 3  # of containers and objects in each other
_TRUSTED = (__name__.partition(".")[0] + ".", "torch.")  # whose hooks know what they do


class Reached:
    """What hooks of submodules of ``model`` can reach, as it is now."""

    def __init__(self, model: nn.Module) -> None:
        inside = {id(module): True for module in model.modules()}
        holders: dict[int, Any] = {}
        for module in [*model.modules()][1:]:
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                for value in () if _is_trusted(hook) else _named_by(hook):
                    _collect(value, holders, inside, _DEPTH)
        self.before = [(holder, copy.copy(holder)) for holder in holders.values()]

    def restored(self) -> bool:
        """Whether tensors were put there; all is as it was then."""
        changed = [(now, then) for now, then in self.before if [*map(id, _items(now))] != [*map(id, _items(then))]]
        known = {id(item) for _, then in changed for item in _items(then)}
        kept = any(structure.flatten(item)[0] for now, _ in changed for item in _items(now) if id(item) not in known)
        for now, then in changed:
            now.clear()
            (now.update if isinstance(now, (dict, set)) else now.extend)(then)
        return kept


def _is_trusted(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).startswith(_TRUSTED)


def _named_by(hook: Any) -> Iterator[Any]:
    """The values that a function can name."""
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _named_by(hook.func)
    elif isinstance(hook, types.MethodType):
        yield hook.__self__
        yield from _named_by(hook.__func__)
    elif isinstance(hook, types.FunctionType) and not _is_trusted(hook):
        for cell in hook.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty
                yield cell.cell_contents
        yield from (hook.__globals__[name] for name in hook.__code__.co_names if name in hook.__globals__)
        yield from hook.__defaults__ or ()
    elif not isinstance(hook, types.FunctionType):
        yield hook


def _collect(value: Any, holders: dict[int, Any], inside: dict[int, bool], depth: int) -> None:
    if isinstance(value, types.FunctionType):  # one that the hook calls
        for named in _named_by(value) if depth else ():
            _collect(named, holders, inside, depth - 1)
        return
    module = isinstance(value, nn.Module)
    if depth == 0 or id(value) in inside or not (module or isinstance(value, _HOLDERS) or structure.is_open(value)):
        return
    own = value if isinstance(value, _HOLDERS) else getattr(value, "__dict__", None)
    if not isinstance(own, _HOLDERS) or id(own) in holders:
        return
    holders[id(own)] = own
    for item in _items(own):
        if not isinstance(item, torch.Tensor):
            _collect(item, holders, inside, depth - 1)


def _items(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)
