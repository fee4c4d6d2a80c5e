"""Calls whose backward passes are differentiated again (``create_graph=True``): gradient penalties, residuals of differential
equations, products with a Hessian, learning to learn.

The gradients of a planned program have no history, so such calls run by the model's own code. A call does not say beforehand
what will become of it, but the code around it does: where code on the stack, or what that calls, names ``create_graph``, calls
of a kind that is new run like this once, and their backward pass tells.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.capture.python_state.code.code_names import codes, is_trusted, named_by, parts_of
from lowtide.objects import structure
from lowtide.objects.walk import variables
from lowtide.runtime.updates.optimizer import UpdatingOptimizer

_LOG = logging.getLogger(__name__)
_NAME = "create_graph"
_DEFINED = (types.FunctionType, classmethod, staticmethod, property)
_DEEP = 3  # calls
_UNHEARD = 3  # calls of a kind, through which no backward pass came: there will be none
WHY = f"backward passes through it are differentiated again ({_NAME}=True), which those of a planned program cannot be"


@dataclass(eq=False, slots=True, weakref_slot=True)
class OwnCall:
    """A call with these parameters and buffers that runs by the model's own code, and waits for its backward pass as planned
    ones do: as long as it has a ``generator``."""

    inputs: list[torch.Tensor]
    optimizer: UpdatingOptimizer | None
    generator: Any = True
    received: bool = False

    def begin(self) -> None:
        if self.optimizer is not None:
            self.optimizer.fill_zeroed()
            self.optimizer.called(self)

    def end(self) -> None:
        """Its backward pass has come."""
        if self.optimizer is not None and self.generator is not None:
            self.optimizer.begin(self, None, ())
            self.generator, self.inputs = None, []


class DifferentiatedAgain:
    """Which calls of a model are. ``any``: whether some are known to be. ``told``: called when a backward pass that is
    differentiated in turn comes to one."""

    def __init__(self, name: str, told: Callable[[], None] | None = None) -> None:
        self.any, self._told = False, told
        self._name = name
        self._watches: bool | None = None  # None: the code around the first call has not been asked
        self._kinds: dict[Any, bool] = {}
        self._run = set[Any]()  # kinds of calls
        self._unheard: Counter[Any] = Counter()  # kinds of those that no backward pass came to

    def kind_of(
        self, inputs: Sequence[torch.Tensor], caller: types.FrameType | None, within: types.CodeType | None = None
    ) -> Any:
        """The kind of a call on these flat inputs, which the code in ``caller`` makes, where it is one of them, or may be; else
        ``None``. Of who calls ``within`` nothing is asked."""
        if self._watches is None:
            self._watches = is_named(caller, within)
        if not self._watches:
            return None
        kind = (*((tensor.requires_grad, tensor.is_leaf) for tensor in inputs), _place(caller, within))
        return kind if self._kinds.get(kind, True) else None

    def is_new(self, kind: Any) -> bool:
        """Whether no call of the kind has run like this."""
        return kind not in self._run

    def run(self, kind: Any, forward: Callable[..., Any], args: Any, kwargs: Any, call: OwnCall | None = None) -> Any:
        """``forward(*args, **kwargs)``, of this kind; listens to the backward passes through what it returns. ``call`` lasts as
        long as one may come, and updates nothing from when one is differentiated in turn."""
        self._run.add(kind)
        if call is not None:
            call.begin()
        heard = functools.partial(self._heard, kind, call)
        result = forward(*args, **kwargs)
        nodes = {tensor.grad_fn for tensor in structure.flatten(result)[0]} - {None}
        for node in nodes:
            node.register_prehook(heard)  # type: ignore[union-attr]
        if not nodes:  # no backward pass comes to it
            self._kinds.setdefault(kind, False)
        if not any(tensor.requires_grad for tensor in structure.flatten((args, kwargs))[0]):  # as what penalties are of
            weakref.finalize(heard, self._gone, kind).atexit = False  # its nodes hold it
        return result

    def _gone(self, kind: Any) -> None:
        """Of a call of this kind nothing is left that a backward pass could come through."""
        self._unheard[kind] += kind not in self._kinds
        if self._unheard[kind] >= _UNHEARD:
            self._kinds.setdefault(kind, False)

    def _heard(self, kind: Any, call: OwnCall | None, gradients: Any) -> None:
        """A backward pass has come to a call of this kind."""
        if not torch.is_grad_enabled():
            self._kinds.setdefault(kind, False)
            if call is not None:
                call.end()
            return
        self._kinds[kind] = True
        if call is not None and call.optimizer is not None:
            call.optimizer.give_up(WHY)
        if self._told is not None:
            self._told()
        if not self.any:
            self.any = True
            _LOG.warning(
                "calls of %s run by its own code, outside the budget, where %s. lowtide.online runs them within a budget.",
                self._name, WHY,
            )  # fmt: skip


def is_named(caller: types.FrameType | None, within: types.CodeType | None = None) -> bool:
    """Whether code on the stack from here on, code in the modules that it belongs to, or what that calls, says
    ``create_graph``. What calls a part ``within`` a model are modules, and so may be what comes after it."""
    modules: dict[int, dict[str, Any]] = {}
    classes = set[type]()
    for frame, root in _stack(caller, within):
        if root != "lowtide" and _says(frame.f_code):
            return True
        if root not in ("torch", "lowtide"):
            modules[id(frame.f_globals)] = frame.f_globals
            owner = None if within is None else variables(frame).get("self")
            classes.update(map(type, owner.modules() if isinstance(owner, nn.Module) else ()))
    found = {function for module in modules.values() for function in _functions(module)}
    found.update(each for kind in classes for base in kind.__mro__ for each in _methods(base) if not is_trusted(each))
    latest = found
    for _ in range(_DEEP):
        if any(_says(function.__code__) for function in latest):
            return True
        latest = {each for function in latest for _, each in named_by(function) if _is_called(each)} - found
        found |= latest
    return False


def _is_called(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and not is_trusted(value)


def _place(caller: types.FrameType | None, within: types.CodeType | None) -> tuple[types.CodeType, int] | None:
    """Where the user's code makes the call: losses and penalties call a model in the same way."""
    own = (frame for frame, root in _stack(caller, within) if root not in ("torch", "lowtide"))
    return next(((frame.f_code, frame.f_lasti) for frame in own), None)


def _stack(frame: types.FrameType | None, within: types.CodeType | None) -> Iterator[tuple[types.FrameType, str]]:
    """From here on, each frame and the package that its code is in."""
    while frame is not None and frame.f_code is not within:
        yield frame, str(frame.f_globals.get("__name__")).partition(".")[0]
        frame = frame.f_back


@functools.lru_cache(maxsize=1 << 14)
def _says(code: types.CodeType) -> bool:
    """Names of keyword arguments lie in a tuple among the constants."""
    constants = (constant for part in codes(code) for constant in part.co_consts)
    return any(constant == _NAME or (isinstance(constant, tuple) and _NAME in constant) for constant in constants)


def _functions(module: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """Those that a module defines, in classes as well."""
    name = module.get("__name__")
    for value in list(module.values()):
        own_class = isinstance(value, type) and value.__module__ == name
        yield from (each for each in (_methods(value) if own_class else _parts(value)) if each.__module__ == name)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for member in list(vars(kind).values()):
        yield from _parts(member)


def _parts(member: Any) -> Iterator[types.FunctionType]:
    found = parts_of(member) if isinstance(member, _DEFINED) else ()
    yield from (each for each in found if isinstance(each, types.FunctionType))
