"""Run a module that cannot be captured again in the backward pass, instead of keeping what it saves.

This uses PyTorch's checkpointing on eager's own autograd graph, so gradients are added in eager's order. In addition,
state that checkpointing leaves to its user is handled here: attributes, buffers, arguments (a cache of keys and values,
say) and the generators of Python and NumPy. The second run finds these as the first run found them, makes the same
decisions, and leaves the state as it is now.
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

_LARGE = 1 << 16  # bytes: larger buffers are copied only before a write


class Recomputation:
    """Runs one module this way, call after call. Its attributes and what its code can reach are looked up once and
    reused while unchanged."""

    def __init__(self) -> None:
        self._attributes: Snapshot | None = None
        self._reach: Reach | None = None
        self._of: list[tuple[weakref.ref[nn.Module], tuple[Any, ...]]] = []  # modules looked at, and their hooks

    def run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        on_run: Callable[[], None],
    ) -> Any:
        """Call ``forward(*args, **kwargs)`` of ``module``, so that it runs again when the backward pass needs what it
        would have saved. ``on_run`` is called then."""
        marked = map(vars, (*module.parameters(), *module.buffers()))  # hooks may keep counts there
        given = reach_of((*args, *marked), kwargs)
        before = _State(module, self._attributes_of(module), self._reach_of(module), given)
        values = pytree.tree_leaves((tuple(args), dict(kwargs)))  # checkpointing checks each for writes
        decisions: list[Any] = []

        def again(*values: Any) -> Any:
            return forward(*args, **kwargs)

        def contexts() -> tuple[Any, Any]:
            return _first(before, decisions), _Again(lambda: _again(module, before, decisions, on_run))

        nested = any(isinstance(value, torch.Tensor) and value.is_nested for value in values)
        check = "none" if nested else "default"  # the default check reads shapes; nested tensors lack them
        result = checkpoint(again, *values, use_reentrant=False, context_fn=contexts, determinism_check=check)
        before.settle()
        return result

    def _attributes_of(self, module: nn.Module) -> Snapshot:
        """The module's attributes now. Tensors among them are not kept beyond the call."""
        found = self._attributes
        if found is None or not found.is_current:
            found = snapshot(module)
            self._attributes = None if found.holds_tensors else found
        return found

    def _reach_of(self, module: nn.Module) -> Reach:
        """What the module's code can write to outside of it, with its present content."""
        now = [(each, hooks_of(each)) for each in module.modules()]
        if self._reach is None or not self._is_of(now):
            self._of = [(weakref.ref(each), hooks) for each, hooks in now]
            self._reach = ExternalEffects(module, ())
        else:
            self._reach = self._reach.as_now()
        return self._reach

    def _is_of(self, now: Sequence[tuple[nn.Module, tuple[Any, ...]]]) -> bool:
        """Whether these are the modules and hooks looked at before."""
        if len(now) != len(self._of):
            return False
        pairs = zip(now, self._of, strict=True)
        return all(
            each is known() and [*map(id, hooks)] == [*map(id, others)] for (each, hooks), (known, others) in pairs
        )


def reach_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Reach:
    """The containers and objects among a call's arguments, with their content."""
    reach = Reach()
    reach.add((argument, ARGUMENT) for argument in (*args, *kwargs.values()))
    return reach


class _Again:
    """A reusable context manager: makes a new context for each backward pass."""

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
    """State that a run of the module may depend on besides its arguments and parameters. ``buffers``: pairs of buffer
    and copy. ``large``: buffers with their memory and version, copied only when the run is about to write to them."""

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
        # Checkpointing saves generators of the arguments' devices only, and arguments may be plain numbers.
        devices = {
            one.device for one in (*module.parameters(), *module.buffers()) if one.device.type not in ("cpu", "meta")
        }
        self.drawing = [generators.saved(one) for one in (*drawing, *map(generators.default_generator, devices))]

    def copy_before_write(self, arguments: Any) -> None:
        """An operator is about to write to its arguments: copy large buffers among them."""
        given = {_storage(leaf) for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
        self._copy([one for one in self.large if _storage(one[1]) in given], clone=True)

    def settle(self) -> None:
        """The run has ended: note the old memory of large buffers whose memory was replaced."""
        self._copy([one for one in self.large if _storage(one[0]) != _storage(one[1])], clone=False)

    def _copy(self, chosen: Sequence[tuple[torch.Tensor, torch.Tensor, int]], *, clone: bool) -> None:
        self.buffers += [(buffer, value.clone() if clone else value) for buffer, value, _ in chosen]
        done = {id(buffer) for buffer, _, _ in chosen}
        self.large = [one for one in self.large if id(one[0]) not in done]

    def check(self, module: nn.Module) -> None:
        """Raise ``ExecutionError`` if the run cannot be repeated, because a large buffer that it left unchanged was
        written to since."""
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
    """A dispatch mode that reports tensors which operators are about to write to."""

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
    """Whether the operator may write to its arguments. Schemas of normalizations do not mention running statistics."""
    schema = operator._schema
    return schema.is_mutable or any(one.name.startswith("running_") for one in schema.arguments)


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.layout is not torch.strided or tensor.is_nested else tensor.untyped_storage()._cdata


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether to copy the buffer at once: a copy is cheap, or nothing would report writes (sparse tensors)."""
    return not _storage(tensor) or tensor.nbytes <= _LARGE
