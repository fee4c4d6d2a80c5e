"""A module that cannot be captured, run again as a whole in the backward pass instead of keeping what it saves.

PyTorch's own checkpointing does it, on the autograd graph that eager has, so gradients are added in eager's order. What it
leaves to its user is done here: the second run finds the module's attributes, its buffers, what it was called with (a cache of
keys and values that all layers add to) and the generators of Python and NumPy as the first one found them, leaves them as they
are now, and takes over every decision of the first one.
"""

from __future__ import annotations

import contextlib
import functools
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from lowtide.capture.python_state.effects.snapshots import Snapshot, put_back, snapshot
from lowtide.capture.python_state.guards.external_effects import ARGUMENT, ExternalEffects, hooks_of
from lowtide.capture.python_state.guards.reach import Reach
from lowtide.dynamic.patches import UncompiledMode, uncompiled
from lowtide.errors import ExecutionError
from lowtide.objects.walk import parts_of, refill
from lowtide.program import generators
from lowtide.runtime.parts.decisions import recording, replaying

_LARGE = 1 << 16  # bytes of a buffer


class Recomputation:
    """How a module runs again, call after call: its attributes, and what its code can reach outside of it, are looked for
    once, as long as they stay what they are."""

    def __init__(self) -> None:
        self._attributes: Snapshot | None = None
        self._reach: Reach | None = None
        self._of: list[tuple[weakref.ref[nn.Module], tuple[Any, ...]]] = []  # modules and their hooks

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_run: Callable[[], None],
    ) -> Any:
        """``forward(*args, **kwargs)`` of ``module``, which keeps its arguments and decisions and runs again where the backward
        pass needs what it saved: ``on_run`` is called then."""
        marked = map(vars, (*module.parameters(), *module.buffers()))  # hooks may count there, say
        given = reach_of((*args, *marked), kwargs)
        before = _State(module, self._attributes_of(module), self._reach_of(module), given)
        values = pytree.tree_leaves((tuple(args), dict(kwargs)))  # each is watched for writes
        decisions: list[Any] = []

        def again(*values: Any) -> Any:
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return _first(before, decisions), _Again(lambda: _again(module, before, decisions, on_run))

        nested = any(isinstance(value, torch.Tensor) and value.is_nested for value in values)
        check = "none" if nested else "default"  # which reads shapes, and what a nested tensor is made of has none
        result = checkpoint(again, *values, use_reentrant=False, context_fn=contexts, determinism_check=check)
        before.settle()
        return result

    def _attributes_of(self, module: nn.Module) -> Snapshot:
        """As they are now. Tensors among them are let go of with the call."""
        found = self._attributes
        if found is None or not found.is_current:
            found = snapshot(module)
            self._attributes = None if found.holds_tensors else found
        return found

    def _reach_of(self, module: nn.Module) -> Reach:
        """What its code can write now, and what lies there."""
        now = [(each, hooks_of(each)) for each in module.modules()]
        if self._reach is None or not self._is_of(now):
            self._of = [(weakref.ref(each), hooks) for each, hooks in now]
            self._reach = ExternalEffects(module, ())
        else:
            self._reach = self._reach.as_now()
        return self._reach

    def _is_of(self, now: Sequence[tuple[nn.Module, tuple[Any, ...]]]) -> bool:
        """Whether these are the modules and the hooks that were looked at."""
        if len(now) != len(self._of):
            return False
        pairs = zip(now, self._of, strict=True)
        return all(
            each is known() and [*map(id, hooks)] == [*map(id, others)] for (each, hooks), (known, others) in pairs
        )


def reach_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reach:
    """The containers and objects that a call is given, and what they hold."""
    reach = Reach()
    reach.add((argument, ARGUMENT) for argument in (*args, *kwargs.values()))
    return reach


class _Again:
    """A context that is entered once for each backward pass."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> bool | None:
        return self._entered.pop().__exit__(*exception)


@contextlib.contextmanager
def _first(before: _State, decisions: list[Any]) -> Iterator[None]:
    with _Writing(before) if before.large else contextlib.nullcontext(), recording(decisions):
        yield


@contextlib.contextmanager
def _again(module: nn.Module, before: _State, decisions: list[Any], on_run: Callable[[], None]) -> Iterator[None]:
    on_run()
    before.check(module)
    attributes = before.attributes if before.attributes.is_current else snapshot(module)
    now = _State(module, attributes, before.outside.as_now(), before.arguments.as_now(), before)
    before.put_back(module)
    try:
        with replaying(decisions):
            yield
    finally:
        now.put_back(module)


class _State:
    """What a run of the module may depend on beside its arguments and parameters. ``buffers`` with copies of their values;
    ``large`` ones, which are copied when the run is about to write into them, with their memory and versions."""

    def __init__(
        self, module: nn.Module, attributes: Snapshot, outside: Reach, arguments: Reach, before: _State | None = None
    ) -> None:
        self.attributes = attributes
        self.registered = [(each, dict(each._buffers)) for each in module.modules()]
        buffers: list[torch.Tensor] = (
            [*module.buffers()] if before is None else [buffer for buffer, _ in before.buffers]
        )
        small = [buffer for buffer in buffers if before is not None or _is_small(buffer)]
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = [(buffer, buffer.detach().clone()) for buffer in small]
        copied = {*map(id, small)}
        self.large = [(buffer, buffer.detach(), buffer._version) for buffer in buffers if id(buffer) not in copied]
        self.generators = random.getstate(), np.random.get_state()
        self.outside, self.arguments = outside, arguments
        held = [one for value in self.attributes.attributes.values() for one in parts_of(value)]
        drawing = [one for one in held if isinstance(one, torch.Generator)]
        # Of the device's, checkpoints keep those of the arguments' devices alone, and a module may be given numbers.
        devices = {
            one.device for one in (*module.parameters(), *module.buffers()) if one.device.type not in ("cpu", "meta")
        }
        self.drawing = [generators.saved(one) for one in (*drawing, *map(generators.default_generator, devices))]

    def copy_before_write(self, arguments: Any) -> None:
        """An operator is about to write into some of these."""
        given = {_storage(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        self._copy([one for one in self.large if _storage(one[1]) in given], clone=True)

    def settle(self) -> None:
        """The run has ended: what was given other memory had this."""
        self._copy([one for one in self.large if _storage(one[0]) != _storage(one[1])], clone=False)

    def _copy(self, chosen: Sequence[tuple[torch.Tensor, torch.Tensor, int]], *, clone: bool) -> None:
        self.buffers += [(buffer, value.clone() if clone else value) for buffer, value, _ in chosen]
        done = {id(buffer) for buffer, _, _ in chosen}
        self.large = [one for one in self.large if id(one[0]) not in done]

    def check(self, module: nn.Module) -> None:
        """Raises ``ExecutionError`` where the run cannot be repeated, since what it left as it was has been written into."""
        for buffer, value, version in self.large:
            if buffer._version != version or _storage(buffer) != _storage(value):
                name = next((name for name, other in module.named_buffers() if other is buffer), "that is gone")
                raise ExecutionError(
                    f"buffer {name} of a {type(module).__name__} was modified between its forward pass and the backward pass, "
                    "in which it runs again with the value that it had. Modify it after the backward pass."
                )

    def put_back(self, module: nn.Module) -> None:
        put_back(module, self.attributes)
        for each, buffers in self.registered:
            refill(each._buffers, buffers)
        with torch.no_grad():
            for buffer, value in self.buffers:
                with _unsafe_preserve_version_counter(buffer):
                    buffer.copy_(value)
        self.outside.put_back()
        self.arguments.put_back()
        random.setstate(self.generators[0])
        np.random.set_state(self.generators[1])
        for generator in self.drawing:
            generators.put_back(generator)


class _Writing(UncompiledMode):
    """Tells what operators are about to write into."""

    def __init__(self, before: _State) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.before = before

    @uncompiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.before.large and _writes(func):
            self.before.copy_before_write((args, kwargs))
        return func(*args, **(kwargs or {}))


@functools.cache
def _writes(operator: Any) -> bool:
    """Whether it may write into what it is given; those that normalize do not say so of running statistics."""
    schema = operator._schema
    return schema.is_mutable or any(one.name.startswith("running_") for one in schema.arguments)


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided or tensor.is_nested else tensor.untyped_storage()._cdata


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether a copy takes little, or nothing else would tell who writes into it, a sparse one."""
    return not _storage(tensor) or tensor.nbytes <= _LARGE
