"""Buffers that a forward pass registers, or replaces by new tensors. They are results of the program, put in place
after every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lowtide.capture.python_state.paths import named
from lowtide.errors import CaptureError
from lowtide.objects.walk import refill
from lowtide.program.distributed.local import spec_of


class MadeBuffer(NamedTuple):
    """A buffer that gets the ``result`` with this number. ``made``: there was no such buffer before. ``declared``:
    there was one, registered as ``None``."""

    result: int
    made: bool
    declared: bool
    persistent: bool


def new_buffers(
    model: nn.Module, names: Sequence[Sequence[str]], tensors: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The buffers of ``model`` that are not the ``tensors`` that had these names before its forward pass.

    Raises ``CaptureError`` if parameters were replaced, or a buffer is gone.
    """
    before = {name: tensor for places, tensor in zip(names, tensors, strict=True) for name in places}
    parameters = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    made = [name for name, parameter in parameters.items() if before.get(name) is not parameter]
    if made:
        raise CaptureError(
            f"the forward pass makes or replaces parameters ({named(made)}), which planned calls would not do. Where only the "
            "first call does, call the model once before it is rematerialized; otherwise write into them outside of the "
            "forward pass, or run the model under lowtide.online."
        )
    gone = [name for name in before if name not in parameters and name not in buffers]
    if gone:
        raise CaptureError(
            f"the forward pass takes away parameters or buffers ({named(gone)}), which planned calls would not do. Where only "
            "the first call does, call the model once before it is rematerialized; otherwise run it under lowtide.online."
        )
    return {name: buffer for name, buffer in buffers.items() if before.get(name) is not buffer}


def declared_buffers(model: nn.Module) -> frozenset[str]:
    """The names of buffers that are registered as ``None``."""
    return frozenset(
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is None
    )


def with_states(results: list[torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The result numbers of those ``buffers`` that have a history (a state from which the next call continues, say).
    They are added to ``results`` if they are not there."""
    states = {name: buffer for name, buffer in buffers.items() if buffer.requires_grad}
    known = set(map(id, results))
    results += {id(state): state for state in states.values() if id(state) not in known}.values()
    numbers = {id(result): number for number, result in enumerate(results)}
    return {name: numbers[id(state)] for name, state in states.items()}


def registered(
    model: nn.Module, results: Mapping[str, int], known: frozenset[str], declared: frozenset[str]
) -> dict[str, MadeBuffer]:
    """How to put buffers in place. ``results``: their numbers among the results. ``known``: names that existed
    before."""
    made = {}
    for name, result in results.items():
        module, leaf = _owner(model, name)
        persistent = leaf not in module._non_persistent_buffers_set
        made[name] = MadeBuffer(result, name not in known, name in declared, persistent)
    return made


def put(model: nn.Module, places: Mapping[str, MadeBuffer], tensors: Sequence[torch.Tensor]) -> None:
    for name, place in places.items():
        module, leaf = _owner(model, name)
        tensor = tensors[place.result]
        module._buffers[leaf] = tensor if tensor.requires_grad else tensor.detach()
        if place.made and place.persistent:
            module._non_persistent_buffers_set.discard(leaf)
        elif place.made:
            module._non_persistent_buffers_set.add(leaf)


@contextlib.contextmanager
def as_given(
    model: nn.Module, places: Mapping[str, MadeBuffer], names: Sequence[Sequence[str]], tensors: Sequence[torch.Tensor]
) -> Iterator[None]:
    """A context in which buffers are the ``tensors`` that a call was given under these ``names``, not those that it
    left (at ``places``) or that later calls left."""
    given = {name: tensor for every, tensor in zip(names, tensors, strict=False) for name in every}
    held = [(path, module, dict(module._buffers)) for path, module in model.named_modules(remove_duplicate=False)]
    try:
        for path, module, buffers in held:
            for leaf, buffer in buffers.items():
                name = f"{path}.{leaf}".lstrip(".")
                if name in given and buffer is not None and spec_of(buffer) is None:
                    module._buffers[leaf] = given[name]
                elif name in places and places[name].made:
                    module._buffers[leaf] = None
                    if not places[name].declared:
                        del module._buffers[leaf]
        yield
    finally:
        for _, module, buffers in reversed(held):
            refill(module._buffers, buffers)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf
