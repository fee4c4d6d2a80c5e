"""Second memories by name."""

from __future__ import annotations

import os
import tempfile
import threading

import torch

from lowtide.errors import PlanError
from lowtide.ir.costs import check_second_memory
from lowtide.offload.interface import SecondMemoryOf

_OPEN: dict[tuple[str, torch.device, int], SecondMemoryOf] = {}  # by name, device and process
_LOCK = threading.Lock()


def open_memory(name: str, device: torch.device) -> SecondMemoryOf:
    """Return this process's second memory of this name for a device. Raises ``PlanError`` if the device cannot have it,
    and ``ExecutionError`` if it cannot be opened."""
    check_second_memory(name)
    key = (name, device, os.getpid())
    if key in _OPEN:
        return _OPEN[key]
    with _LOCK:
        if key not in _OPEN:
            _OPEN[key] = _opened(name, device)
        return _OPEN[key]


def _opened(name: str, device: torch.device) -> SecondMemoryOf:
    if device.type == "meta":
        raise PlanError(
            f"offload={name!r}: how quick the second memory of a model on meta is cannot be measured; put the model on its "
            'device, or ask lowtide.fits(model, ..., device=..., offload="cpu") for a device that is known by its name.'
        )
    if name == "cpu":
        if device.type == "cpu":
            raise PlanError('offload="cpu" moves tensors to where those of a model on the CPU are; use "disk".')
        from lowtide.offload.host import HostMemory

        return HostMemory(device)
    if device.type != "cpu":
        raise PlanError(f'offload={name!r} is for models on the CPU, not on {device}; use offload="cpu".')
    from lowtide.offload.disk import DiskMemory

    return DiskMemory(os.path.expanduser(name.partition(":")[2]) or tempfile.gettempdir())
