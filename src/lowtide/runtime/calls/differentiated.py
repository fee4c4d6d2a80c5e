"""Calls whose backward passes are differentiated again (``create_graph=True``): gradient penalties, residuals of
differential equations, Hessian products, meta-learning.

The gradients of a planned program have no autograd history, so such calls run by the model's own code. A call alone
does not show what will be done with it, but the code around it does. If code on the stack, or functions it calls,
contain the name ``create_graph``, each new kind of call runs by its own code first, and its backward pass shows whether
it was one of these.
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
from lowtide.objects.walk import is_a, own_attributes, variables
from lowtide.runtime.updates.optimizer import UpdatingOptimizer

_LOG = logging.getLogger(__name__)
_NAME = "create_graph"
_DEFINED = (types.FunctionType, classmethod, staticmethod, property)
_DEEP = 3  # how far to follow calls from function to function
_UNHEARD = 3  # calls of a kind without a backward pass, after which none is expected
WHY = f"backward passes through it are differentiated again ({_NAME}=True), which those of a planned program cannot be"


@dataclass(eq=False, slots=True, weakref_slot=True)
class OwnCall:
    """A call that runs by the model's own code and waits for its backward pass as planned calls do, while it has a
    ``generator``. ``inputs``: its parameters and buffers."""

    inputs: list[torch.Tensor]
    optimizer: UpdatingOptimizer | None
    generator: Any = True
    received: bool = False

    def begin(self) -> None:
        if self.optimizer is not None:
            self.optimizer.fill_zeroed()
            self.optimizer.called(self)

    def end(self) -> None:
        """A backward pass has reached it."""
        if self.optimizer is not None and self.generator is not None:
            self.optimizer.begin(self, None, ())
            self.generator, self.inputs = None, []


class DifferentiatedAgain:
    """Finds the calls of a model whose backward passes are differentiated again. ``any``: whether one was found.
    ``told``: called when such a backward pass reaches a call."""

    def __init__(self, name: str, told: Callable[[], None] | None = None) -> None:
        self.any, self._told = False, told
        self._name = name
        self._watches: bool | None = None  # None: code around the first call not yet inspected
        self._kinds: dict[Any, bool] = {}
        self._run = set[Any]()  # kinds of calls
        self._unheard: Counter[Any] = Counter()  # calls without a backward pass, by kind

    def kind_of(
        self, inputs: Sequence[torch.Tensor], caller: types.FrameType | None, within: types.CodeType | None = None
    ) -> Any:
        """The kind of a call with these flat inputs from code in frame ``caller``, if it is, or may be, differentiated
        again; else ``None``. On the stack, the frame of ``within`` and all its callers are ignored."""
        if self._watches is None:
            self._watches = is_named(caller, within)
        if not self._watches:
            return None
        kind = (*((tensor.requires_grad, tensor.is_leaf) for tensor in inputs), _place(caller, within))
        return kind if self._kinds.get(kind, True) else None

    def is_new(self, kind: Any) -> bool:
        """Whether no call of the kind has run this way."""
        return kind not in self._run

    def run(self, kind: Any, forward: Callable[..., Any], args: Any, kwargs: Any, call: OwnCall | None = None) -> Any:
        """Call ``forward(*args, **kwargs)`` and listen to backward passes through its results. ``call`` exists while
        one may come; once a backward pass is differentiated again, its optimizer stops updating in backward passes."""
        self._run.add(kind)
        if call is not None:
            call.begin()
        heard = functools.partial(self._heard, kind, call)
        result = forward(*args, **kwargs)
        nodes = {tensor.grad_fn for tensor in structure.flatten(result)[0]} - {None}
        for node in nodes:
            node.register_prehook(heard)  # type: ignore[union-attr]
        if not nodes:  # no backward pass can reach it
            self._kinds.setdefault(kind, False)
        if not any(tensor.requires_grad for tensor in structure.flatten((args, kwargs))[0]):  # gradient penalties
            weakref.finalize(heard, self._gone, kind).atexit = False  # kept alive by the autograd nodes
        return result

    def _gone(self, kind: Any) -> None:
        """The autograd graph of a call of this kind was freed without a backward pass."""
        self._unheard[kind] += kind not in self._kinds
        if self._unheard[kind] >= _UNHEARD:
            self._kinds.setdefault(kind, False)

    def _heard(self, kind: Any, call: OwnCall | None, gradients: Any) -> None:
        """A backward pass has reached a call of this kind."""
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
    """Whether ``create_graph`` occurs in code on the stack from ``caller`` on, in the modules of that code, or in
    functions called from there. With ``within`` (calls of a part in a model), the classes of modules on the stack are
    searched too."""
    modules: dict[int, dict[str, Any]] = {}
    classes, found = set[type](), set[types.FunctionType]()
    for frame, root in _stack(caller, within):
        if root != "lowtide" and _says(frame.f_code):
            return True
        if root not in ("torch", "lowtide"):
            modules[id(frame.f_globals)] = frame.f_globals
            found.update(_called_in(frame) if within is None else ())
            owner = None if within is None else variables(frame).get("self")
            classes.update(map(type, owner.modules() if isinstance(owner, nn.Module) else ()))
    found.update(function for module in modules.values() for function in _functions(module))
    found.update(each for kind in classes for base in kind.__mro__ for each in _methods(base) if not is_trusted(each))
    latest = found
    for _ in range(_DEEP):
        if any(_says(function.__code__) for function in latest):
            return True
        latest = {each for function in latest for _, each in named_by(function) if _is_called(each)} - found
        found |= latest
    return False


def _called_in(frame: types.FrameType) -> Iterator[types.FunctionType]:
    """Functions that code in a frame may call: functions it names, methods of objects it names, and the same in those
    of their attributes that it names. A loss may come from another module, or be given to a trainer."""
    code, scope = frame.f_code, {**frame.f_globals, **variables(frame)}
    names = {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
    held = [scope[name] for name in names if name in scope]
    owned = [own_attributes(value) or {} for value in held]
    held += [own[name] for own in owned for name in code.co_names if name in own]
    yield from (each for value in held for each in _code_of(value) if not is_trusted(each))


def _code_of(value: Any) -> Iterator[types.FunctionType]:
    """The functions that run if the value, or a method of it, is called. Those of planned models are in their plans."""
    while is_a(value, (functools.partial, types.MethodType)):
        value = value.func if is_a(value, functools.partial) else value.__func__
    kind = type(value)
    if kind is types.FunctionType:
        yield value
    elif not issubclass(kind, types.ModuleType) and "forward" not in (own_attributes(value) or ()):
        bases = value.__mro__ if issubclass(kind, type) else kind.__mro__
        yield from (each for base in bases if not is_trusted(base) for each in _methods(base))


def _is_called(value: Any) -> bool:
    return type(value) is types.FunctionType and not is_trusted(value)


def _place(caller: types.FrameType | None, within: types.CodeType | None) -> tuple[types.CodeType, int] | None:
    """The place in the user's code that makes the call: it tells apart calls for losses and calls for penalties."""
    own = (frame for frame, root in _stack(caller, within) if root not in ("torch", "lowtide"))
    return next(((frame.f_code, frame.f_lasti) for frame in own), None)


def _stack(frame: types.FrameType | None, within: types.CodeType | None) -> Iterator[tuple[types.FrameType, str]]:
    """The frames from ``frame`` on up to ``within``, each with the top-level package of its code."""
    while frame is not None and frame.f_code is not within:
        yield frame, str(frame.f_globals.get("__name__")).partition(".")[0]
        frame = frame.f_back


@functools.lru_cache(maxsize=1 << 14)
def _says(code: types.CodeType) -> bool:
    """Whether code contains the name. Names of keyword arguments are in a tuple among the constants."""
    constants = (constant for part in codes(code) for constant in part.co_consts)
    return any(constant == _NAME or (isinstance(constant, tuple) and _NAME in constant) for constant in constants)


def _functions(module: Mapping[str, Any]) -> Iterator[types.FunctionType]:
    """The functions that a module defines, including those in its classes."""
    name = module.get("__name__")
    for value in list(module.values()):
        own_class = is_a(value, type) and value.__module__ == name
        yield from (each for each in (_methods(value) if own_class else _parts(value)) if each.__module__ == name)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for member in list(vars(kind).values()):
        yield from _parts(member)


def _parts(member: Any) -> Iterator[types.FunctionType]:
    found = parts_of(member) if is_a(member, _DEFINED) else ()  # some raise an error when asked for a class
    yield from (each for each in found if isinstance(each, types.FunctionType))
