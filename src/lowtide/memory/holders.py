"""Finds what holds a device's memory, among all tensors that Python tracks, for out-of-memory messages."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from lowtide.units import format_bytes

_PLAIN = (torch.Tensor, nn.Parameter)


class Holder(NamedTuple):
    """A kind of holder: its ``nbytes`` in ``storages`` storages, and a tensor on the largest of these."""

    name: str
    nbytes: int
    storages: int
    largest: torch.Tensor | None

    def __str__(self) -> str:
        if self.largest is None:
            return f"{self.name} nothing"
        one = f"{str(self.largest.dtype).removeprefix('torch.')}{list(self.largest.shape)}"
        return f"{self.name} {format_bytes(self.nbytes)} ({self.storages} storages, the largest {one})"


def holders(model: nn.Module, device: torch.device, inputs: Iterable[torch.Tensor] = ()) -> list[Holder]:
    """Return the holders of ``device``'s memory: parameters and buffers, their gradients, states of all optimizers, ``inputs``
    of the call, and all other tensors of the process. A storage held by several counts for the first."""
    objects = gc.get_objects()
    optimizers = [one for one in objects if issubclass(type(one), torch.optim.Optimizer)]
    seen: set[int] = set()
    kinds: dict[str, Iterable[object]] = {
        "parameters and buffers": [*model.parameters(), *model.buffers()],
        "gradients": [parameter.grad for parameter in model.parameters()],
        "states of optimizers": [
            value
            for one in optimizers
            for state in one.state.values()
            if isinstance(state, dict)
            for value in state.values()
        ],
        "inputs of the call": inputs,
        "other tensors": objects,
    }
    return [_holder(name, tensors, device, seen) for name, tensors in kinds.items()]


def _holder(name: str, tensors: Iterable[object], device: torch.device, seen: set[int]) -> Holder:
    """Sum up the tensors whose storage is not in ``seen``, and add their storages to it."""
    nbytes, storages, largest, most = 0, 0, None, -1
    for one in tensors:
        if type(one) not in _PLAIN:  # wrapper tensors have no storage
            continue
        assert isinstance(one, torch.Tensor)
        if one.device != device or one.layout is not torch.strided:
            continue
        storage = one.untyped_storage()
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        size = storage.nbytes()
        nbytes, storages = nbytes + size, storages + 1
        if size > most:
            largest, most = one, size
    return Holder(name, nbytes, storages, largest)
