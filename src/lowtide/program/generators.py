"""PyTorch's random generators by device, and operators that draw the same numbers again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

from lowtide.device import accelerator_in_use, accelerators, interface_of
from lowtide.errors import ExecutionError
from lowtide.program import targets

SavedState = tuple[torch.Generator, bytes]
_GENERATOR = ("generator", "Optional[Generator]")  # name and type of the argument in schemas
_PROBE, _PROBED = torch.empty((), dtype=torch.int64, device="cpu"), threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which operators on the device draw; without an index, that of the current device."""
    return interface_of(device).generator()


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """A context that leaves the device's generator as it was. Unlike ``torch.random.fork_rng`` it calls no public
    functions."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """The same for the CPU's generator and, once the process uses the accelerator, for those of all its devices."""
    used = [] if accelerator_in_use() is None else accelerators()
    with contextlib.ExitStack() as stack:
        for device in (torch.device("cpu"), *(each.device for each in used)):
            stack.enter_context(kept(device))
        yield


def saved(generator: torch.Generator) -> SavedState:
    """The generator and its state. The state lies outside PyTorch's allocator, so it does not count toward a budget."""
    return generator, generator.get_state().numpy().tobytes()


def put_back(state: SavedState | None) -> None:
    """Set the generator to the saved state."""
    if state is not None:
        _restore(*state)


@contextlib.contextmanager
def replayed(state: SavedState | None) -> Iterator[None]:
    """A context in which the generator starts from the saved state. Afterwards it continues as if nothing had been
    drawn."""
    if state is None:
        yield
        return
    present = saved(state[0])
    _restore(*state)
    try:
        yield
    finally:
        _restore(*present)


def _restore(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class Draw:
    """The state of a generator before a random operator, so that the operator can draw the same again."""

    __slots__ = ("_after", "_generator", "_there")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._there = generator.clone_state()  # a state tensor would count as memory
        self._after: Any = None

    def drawn(self) -> None:
        """Called after the operator has run, if it is to draw ``again``: record the state of the generator now."""
        self._after = _place(self._generator)

    @contextlib.contextmanager
    def again(self) -> Iterator[torch.Generator]:
        """A new generator in the recorded state. Other threads may draw and seed meanwhile. Raises ``ExecutionError``
        if the operator does not leave it in the same state as the first time."""
        own = self._there.clone_state()
        yield own
        if self._after is not None and self._after != _place(own):
            raise ExecutionError(
                "another thread drew from PyTorch's generator, or seeded it, just when random numbers were drawn that a "
                "backward pass needs again: they cannot be had, and gradients would be wrong. Draw in other threads from a "
                "torch.Generator of their own."
            )

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """A context for operators that take no generator: PyTorch's own is in the recorded state. No other thread may
        draw or seed."""
        return replayed((self._generator, saved(self._there)[1]))


def _place(generator: torch.Generator) -> Any:
    """A key that is equal for generators of one device in the same state. It takes no device memory; for the CPU, it is
    the next number to be drawn."""
    if generator.device.type != "cpu":
        return generator.get_state().numpy().tobytes()
    ahead = generator.clone_state()
    with _PROBED, no_dispatch():  # not an operator of the program
        return int(_PROBE.random_(generator=ahead).item())


@functools.cache
def form_with_generator(target: Callable[..., Any], given: int) -> Callable[..., Any] | None:
    """The form of a random operator that takes a keyword ``generator`` beside ``given`` positional arguments; ``None``
    if there is none."""
    if target is targets.bernoulli:
        return target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    wanted, packet = _arguments(target), target.overloadpacket
    for form in (target, *(getattr(packet, name) for name in packet.overloads())):
        found = _arguments(form)
        if _without_generator(found) == _without_generator(wanted) and _GENERATOR in found[given:]:
            return form  # type: ignore[no-any-return]
    return None


def _arguments(target: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _without_generator(arguments: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [one for one in arguments if one != _GENERATOR]
