"""PyTorch's own random generators, by device, and operators that draw from them once more."""

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
_GENERATOR = ("generator", "Optional[Generator]")  # an argument, as schemas tell of it
_PROBE, _PROBED = torch.empty((), dtype=torch.int64, device="cpu"), threading.Lock()


def default_generator(device: torch.device) -> torch.Generator:
    """The one that operators on the device draw from; without an index, on the current one."""
    return interface_of(device).generator()


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """The device's generator is afterwards as before. Unlike ``torch.random.fork_rng`` this calls nothing that users call."""
    generator = default_generator(device)
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def all_kept() -> Iterator[None]:
    """The same of the CPU's and, once the process uses it, of all devices of its accelerator."""
    used = [] if accelerator_in_use() is None else accelerators()
    with contextlib.ExitStack() as stack:
        for device in (torch.device("cpu"), *(each.device for each in used)):
            stack.enter_context(kept(device))
        yield


def saved(generator: torch.Generator) -> SavedState:
    """The generator and its state, outside PyTorch's allocator, so that it does not count towards a budget."""
    return generator, generator.get_state().numpy().tobytes()


def put_back(state: SavedState | None) -> None:
    """The generator draws as it did from the saved state."""
    if state is not None:
        _restore(*state)


@contextlib.contextmanager
def replayed(state: SavedState | None) -> Iterator[None]:
    """The generator draws as it did from the saved state, and goes on afterwards as if nothing had been drawn."""
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
    """Where a generator stands before a random operator, so that the operator can draw the same again."""

    __slots__ = ("_after", "_generator", "_there")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._there = generator.clone_state()  # a state as a tensor would count for a moment
        self._after: Any = None

    def drawn(self) -> None:
        """The operator has run, and is to draw ``again``: note where the generator stands now."""
        self._after = _place(self._generator)

    @contextlib.contextmanager
    def again(self) -> Iterator[torch.Generator]:
        """A generator of its own that stands where the other one stood. Other threads may draw and seed meanwhile. Raises
        ``ExecutionError`` where the operator does not leave it where it left the other one at first."""
        own = self._there.clone_state()
        yield own
        if self._after is not None and self._after != _place(own):
            raise ExecutionError(
                "another thread drew from PyTorch's generator, or seeded it, just when random numbers were drawn that a "
                "backward pass needs again: they cannot be had, and gradients would be wrong. Draw in other threads from a "
                "torch.Generator of their own."
            )

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """For operators that take no generator: PyTorch's own stands where it stood. No other thread may draw or seed."""
        return replayed((self._generator, saved(self._there)[1]))


def _place(generator: torch.Generator) -> Any:
    """Equal for generators of one device that stand at the same place. Takes no memory of the device: of the CPU's, the number
    that would be drawn next."""
    if generator.device.type != "cpu":
        return generator.get_state().numpy().tobytes()
    ahead = generator.clone_state()
    with _PROBED, no_dispatch():  # it is nobody's operator
        return int(_PROBE.random_(generator=ahead).item())


@functools.cache
def form_with_generator(target: Callable[..., Any], given: int) -> Callable[..., Any] | None:
    """The form of a random operator that takes a keyword ``generator`` beside ``given`` arguments without names; ``None`` where
    there is none."""
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
