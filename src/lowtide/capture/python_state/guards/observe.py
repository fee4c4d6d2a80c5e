"""What Python code reads while it runs, with the way to it.

A traced forward pass runs on a copy of the model. Inside ``Observer.watching()`` every attribute that it reads is noted, of the
copy's modules and of any object that is reached from them or from variables that its code names: classes of such objects get
methods that note reads and writes, for the time and the thread of the trace. A holder (``objects.walk``) that is read is
noted with all that is in it, and so on inward; there is no limit to how deep or how much.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from lowtide.capture.python_state.code import code_names
from lowtide.capture.python_state.code.asked import Named, asked_by, asked_under
from lowtide.capture.python_state.code.installed import is_changeable, is_installed, is_library
from lowtide.capture.python_state.code.late import formulas
from lowtide.capture.python_state.guards import files
from lowtide.capture.python_state.guards.caches import Results, is_cache
from lowtide.capture.python_state.guards.classes_shown import ClassesShown, is_shown
from lowtide.capture.python_state.guards.namespaces import Namespaces
from lowtide.capture.python_state.guards.noting import SAVING, NotingClasses, is_for_own_ends
from lowtide.capture.python_state.guards.reads import Content, Contents, Reads, decided_by, is_registered, put_together
from lowtide.capture.python_state.guards.standing import STAND_INS, Standing
from lowtide.capture.python_state.paths import FORWARD_HOOKS
from lowtide.objects import opaque
from lowtide.objects.places import current, part_name
from lowtide.objects.walk import ABSENT, OWN, PLAIN, content, fields, own_attributes

_WHOLE = frozenset({"__dict__", "__getstate__", "__reduce_ex__"})  # whoever reads these reads all attributes
_PAST = frozenset({"__getattribute__", "getattr_static"})  # read past what a class says
_INHERITED = frozenset(vars(nn.Module)) - {"forward"} - _WHOLE
_SHADOWED = _INHERITED - {"_call_impl", "named_modules"}  # maybe others in a trace; but for what all are asked for
_INTERNAL = OWN - SAVING  # read in every call
_ATOMS = frozenset((*PLAIN, *STAND_INS))  # not what is derived from them, which may have attributes
_OPAQUE = ("torch", "logging", "threading", "re", "enum", "abc", "typing", "builtins", "lowtide")


class Observer:
    """Notes what a run of ``clone`` reads, in terms of ``model``, of which it is a copy. ``copies``: what each object in it is
    a copy of, and the copy, by the id of that. ``modules``: the base of all modules, added for several runs, since each change
    of it is one of every class of modules. ``numbers``: what stands for some in the copy. ``written``: attributes that the run
    wrote, by the copy's id and the name."""

    def __init__(
        self,
        model: nn.Module,
        clone: nn.Module,
        copies: Mapping[int, tuple[Any, ...]],
        reads: Reads,
        modules: NotingClasses,
        numbers: Standing,
        classes: ClassesShown,
        arguments: Sequence[Any] = (),
    ) -> None:
        self.reads, self.copied, self._model, self._arguments = reads, copies, (model, clone), arguments
        self._noted, self.written = set[tuple[int, str]](), set[tuple[int, str]]()
        self.compares = frozenset[str]()  # how code that it may run does
        self._thread, self._busy = threading.get_ident(), False
        self.originals: dict[int, Any] = {}  # of what the run sees, by its id
        self._alive: list[Any] = [clone]  # no id comes again
        self._modules, self._classes, self._numbers, self._shown = modules, NotingClasses(), numbers, classes
        self._waiting: deque[tuple[Any, Any, str]] = deque()
        self.namespaces = Namespaces(reads, self._reach)
        self._unregistered: set[int] = set()  # modules that are not of the model, as the run sees them
        theirs = {*filter(code_names.is_third_party, map(type, model.modules()))}
        self._defining = {kind.__module__ for kind in theirs}
        self._shown.met_library(theirs)

    @contextlib.contextmanager
    def watching(self, *, backward_of: Sequence[torch.Tensor] | None = None) -> Iterator[None]:
        """Around the run, in one thread; and around the backward pass of its results, which runs code of the user's, too (of an
        autograd function, or a hook)."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._classes.remove)
            stack.enter_context(self._shown)
            for classes in (self._modules, self._classes):
                stack.enter_context(classes.noted(self._note_read, self._note_write))
            if backward_of is not None:
                self._classes.add_again()
                self._read(None, formulas(backward_of))
                self._drain()
            else:
                stack.enter_context(files.opened(self.reads.files))
                self._begin()
            yield
            self._drain()

    def _begin(self) -> None:
        model, clone = self._model
        self.reads.note("method", model, "forward", current("method", model, "forward"), "its class's forward")
        arguments, self._arguments = self._arguments, ()  # numbers among them are not to be kept
        for one in code_names.given(arguments):  # what else they hold is a part of the signature
            whole = isinstance(one, (types.FunctionType, types.MethodType, types.ModuleType, type, nn.Module))
            if type(one) not in _ATOMS:
                self._reach(one if whole else type(one), one if whole else type(one), "an argument")
        names = dict(model.named_modules())
        for (name, original), seen in zip(names.items(), clone.modules(), strict=True):
            self.originals[id(seen)] = original
            text, copied = name or type(model).__name__, own_attributes(seen) or {}
            self._reach(type(seen), type(original), "")
            for key, value in own_attributes(original).items():  # type: ignore[union-attr]
                if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                    self._reach(copied.get(key, value), value, f"{text}.{key}")
            if original is not model:
                self._reach_hooks(seen, original, text)
        self._begin_forward((own_attributes(clone) or {}).get("forward"))
        self._drain()

    def _begin_forward(self, copied: Any) -> None:
        """A forward method that the model itself was given, below its planned one."""
        forward = self._original_of(copied, copied)
        if isinstance(forward, functools.partial):
            for name in ("func", "args", "keywords"):
                self.reads.note("made of", forward, name, getattr(forward, name), f"{name} of the model's forward")
        self._reach(ABSENT if copied is None else copied, forward, "the model's forward")

    # What is reached

    def _reach(self, seen: Any, original: Any, text: str) -> None:
        if isinstance(original, torch.Tensor):
            self.reads.note("layout", original, "", current("layout", original, ""), f"the layout of {text}")
            self._texts.setdefault(id(original), text)
            self._note_whole(seen, original)
        elif seen is not ABSENT and type(seen) not in _ATOMS and id(seen) not in self.originals:
            self.originals[id(seen)] = original
            self._alive.append(seen)
            self._waiting.append((seen, original, text))

    def _reach_hooks(self, seen: nn.Module, original: nn.Module, text: str) -> None:
        for registry in FORWARD_HOOKS:
            hooks, copied = ((own_attributes(one) or {})[registry] for one in (original, seen))
            for number, (key, hook) in enumerate(hooks.items()):  # registered anew, it has another key
                self.reads.note("place", hooks, str(number), hook, f"{text}'s hook")
                self._reach(copied.get(key, hook), hook, f"{text}'s hook")

    def _drain(self) -> None:
        """Look at all that was reached, and at what is reached from there."""
        busy, self._busy = self._busy, True
        try:
            while self._waiting:
                while self._waiting:
                    self._look(*self._waiting.popleft())
                self.namespaces.read_named()
        finally:
            self._busy = busy

    def _look(self, seen: Any, original: Any, text: str) -> None:
        if type(original) is weakref.ProxyType:  # of which a copy is no proxy
            referents = content(original) or ()
            self.reads.contents.setdefault(id(original), Content(original, referents))
            for referent in referents:
                inner = referent if seen is original else seen
                self.originals.pop(id(inner), None)
                self._reach(inner, referent, text)
        elif isinstance(seen, types.FunctionType):
            self._look_at_function(seen, original if isinstance(original, types.FunctionType) else seen)
        elif isinstance(seen, type):
            self._look_at_class(seen)
        elif isinstance(seen, types.ModuleType):
            self._look_at_namespace(seen)
        elif isinstance(seen, nn.Module):
            self._look_at_module(seen, original, text)
        elif isinstance(seen, enum.Enum):
            self._reach(type(seen), type(seen), "")
            self._texts[id(original)] = text
            self._note_whole(seen, original)
        else:
            self._look_at_object(seen, original, text)

    def _look_at_object(self, seen: Any, original: Any, text: str) -> None:
        self._numbers.was_reached(seen)
        if is_cache(original):
            self._look_at_cache(original, text)
        seeded = isinstance(original, torch.Generator) and "initial_seed" in self.namespaces.attributes
        asks = seeded or isinstance(original, types.BuiltinFunctionType)
        self._read(original, (*(asked_by(original) if asks else ()), *asked_under({str(type(original).__module__)})))
        items = content(original)
        if opaque.is_unknown(original, items):
            self.reads.unknown[id(original)] = (
                f"{text or 'an item'}, a {type(original).__module__}.{type(original).__name__}"
            )
            self.reads.refuse_unknown()
        if items is not None:
            self._look_into(seen, original, items, text)
        self._watch(seen, original, text)

    def _look_at_cache(self, cache: Any, text: str) -> None:
        results = self.reads.caches.setdefault(id(cache), Results(cache))
        found = results()
        self.reads.note("answer", results, "", found, f"what the cache of {text} holds")
        self._reach(found, found, f"the cache of {text}")

    def _look_into(self, seen: Any, original: Any, items: tuple[Any, ...], text: str) -> None:
        self.reads.contents.setdefault(id(original), Content(original, items))
        inner = items if seen is original else content(seen) or ()
        if len(inner) != len(items):  # an iterator, say, whose copy is of another type
            Contents(self.reads.contents).keep(items)
        matching = len(inner) == len(items) and not isinstance(seen, (set, frozenset))
        for index, item in enumerate(inner):
            own = self._original_of(item, items[index] if matching else item)
            self._reach(item, own, f"{text}{part_name(original, index)}")

    def _original_of(self, seen: Any, otherwise: Any) -> Any:
        """What an object is a copy of. ``otherwise``: what stands in its place in the original, which it is taken for where
        that was not copied itself: a class may copy its objects by way of others."""
        original = self.copied.get(id(seen), (otherwise,))[0]
        other = otherwise is not seen and type(original) is type(otherwise)
        return otherwise if other and id(otherwise) not in self._sources else original

    @functools.cached_property
    def _sources(self) -> set[int]:
        return {id(original) for original, _ in self.copied.values()}

    def _look_at_namespace(self, module: types.ModuleType) -> None:
        self.namespaces.add(module, module.__name__)
        self._read(module, asked_under({*module.__name__.split(".")}))
        self._reach(type(module), type(module), "")

    def _look_at_function(self, seen: types.FunctionType, function: types.FunctionType) -> None:
        self.namespaces.read(function)
        of_user = not is_installed(function.__code__.co_filename)
        if of_user:
            self.compares |= code_names.compares(function.__code__)
        self._numbers.met(function)
        self._shown.met(function)
        theirs = function.__globals__.get("__name__") in self._defining
        self._read(seen, (*code_names.variables_of(function), *(code_names.called_by(function) if theirs else ())))
        self._read(seen, (*code_names.functional_of(function), *code_names.made_of(function)), trusting=True)
        if of_user:  # which may have no attributes yet
            self._texts[id(function)] = code_names.full_name(function)
            self._note_whole(function, function)

    def _read(self, seen: Any, variables: Iterable[Named], *, trusting: bool = False) -> None:
        """``seen``: the function whose code reads them. ``trusting``: what they are is not looked at where it is PyTorch's."""
        for variable in variables:
            value = current(variable.kind, variable.owner, variable.name)
            if is_shown(value):
                continue
            self.reads.note(variable.kind, variable.owner, variable.name, value, variable.text)
            if value is not ABSENT and not (trusting and code_names.is_trusted(value)):
                self._reach(code_names.value_in(seen, variable, value), value, variable.text)

    def _look_at_class(self, kind: type) -> None:
        """Methods that Python looks up in a class are read where nobody sees it: all that stands there is noted."""
        for base in kind.__mro__:
            self.namespaces.add_class(base)
            if not is_library(base):
                self._reach(type(base), type(base), "")
                for function in code_names.functions_of(base):
                    self._reach(function, function, "")
        self.namespaces.add_inherited(kind)

    def _look_at_module(self, seen: nn.Module, original: nn.Module, text: str) -> None:
        """One that is not registered in the model: what it is made of counts where it is read itself."""
        self.reads.note("type", original, "", type(original), f"the class of {text}")
        self._reach(type(seen), type(seen), "")
        for (name, inner), own in zip(seen.named_modules(), original.modules(), strict=False):
            self._unregistered.add(id(inner))
            if id(inner) not in self.originals:
                self.originals[id(inner)] = own
                self._alive.append(inner)
                self._reach(type(inner), type(inner), f"{text}.{name}")
            self._reach_hooks(inner, own, f"{text}.{name}")

    # What is read of objects

    def _watch(self, seen: Any, original: Any, text: str) -> None:
        """Note what is read of an object from now on."""
        self.namespaces.add_inherited(kind := type(seen))
        opaque = str(kind.__module__).partition(".")[0] in _OPAQUE or issubclass(kind, (np.ndarray, np.generic))
        if opaque or not is_changeable(kind):
            return
        if id(kind) not in self.originals:
            self.originals[id(kind)] = kind
            self._look_at_class(kind)  # while it is as its author left it
        self._texts[id(original)] = text
        self.reads.note("type", original, "", type(original), f"the class of {text}")
        if not self._classes.add(kind) or not _PAST.isdisjoint(self.namespaces.attributes):
            self._note_whole(seen, original)

    @functools.cached_property
    def _texts(self) -> dict[int, str]:
        return {id(module): name or type(module).__name__ for name, module in self._model[0].named_modules()}

    def _note_write(self, seen: Any, name: str) -> None:
        self.written.add((id(seen), name))

    def _note_read(self, seen: Any, name: str) -> None:
        key, original = (id(seen), name), self.originals.get(id(seen), ABSENT)
        known = key in self._noted or not {key, (id(original), name)}.isdisjoint(self.written)
        if self._busy or (known and key[0] not in self._numbers.bare):
            return
        if (name in _WHOLE or name in SAVING) and is_for_own_ends(sys._getframe(2)):
            return
        self._numbers.was_read(seen, None if name in _WHOLE else name)
        if known or original is ABSENT or threading.get_ident() != self._thread:
            return
        self._noted.add(key)
        self._busy = True
        if id(seen) in self._unregistered:
            self.reads.hidden.setdefault(id(original), (original, put_together(original)))
        try:
            if name in _WHOLE:
                self._note_whole(seen, original)
            elif self._matters(seen, original, name):
                self._note_one(seen, original, name)
            elif name in _SHADOWED or is_registered(original, name):  # what its own dictionary had would come first
                self._note_one(seen, original, name, look=False)
        finally:
            self._busy = False
        self._drain()

    def _matters(self, seen: Any, owner: Any, name: str) -> bool:
        """Of modules, parameters and buffers are arguments of the program, and submodules are guarded by themselves."""
        if not isinstance(owner, nn.Module) or (name == "training" and id(seen) in self._unregistered):
            return True
        known = is_registered(owner, name) or name in _INTERNAL or name in _WHOLE
        return not known and (name in vars(owner) or name not in _INHERITED)

    def _note_whole(self, seen: Any, original: Any) -> None:
        """All attributes of an object are read."""
        self._numbers.was_read(seen, None)
        for name in fields(original):
            if self._matters(seen, original, name):
                self._note_one(seen, original, name)
        if own_attributes(original) is not None:
            text = self._texts.get(id(original), type(original).__name__)
            self.reads.note_names(original, current("names", original, ""), text)

    def _note_one(self, seen: Any, original: Any, name: str, *, look: bool = True) -> None:
        text = f"{self._texts.get(id(original), type(original).__name__)}.{name}"
        for kind, owner in decided_by(original, name)[: 2 if look or name not in _SHADOWED else 1]:
            value = current(kind, owner, name)
            self.reads.note(kind, owner, name, value, f"{owner.__name__}.{name}" if kind == "class" else text)
            now = value if kind == "class" else current(kind, seen, name)
            if look and value is not ABSENT and now is not ABSENT:
                self._reach(now, self._original_of(now, value), text)
