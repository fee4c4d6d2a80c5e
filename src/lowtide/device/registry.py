"""The interface of each device, and the devices of this machine.

As in PyTorch, a process has one type of accelerator (``torch.accelerator``), and maybe several devices of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lowtide.device.accelerator import Accelerator
from lowtide.device.cpu import Cpu
from lowtide.device.cuda import Cuda
from lowtide.device.interface import DeviceInterface
from lowtide.errors import PlanError

# By device type; other accelerators get an ``Accelerator``.
_ACCELERATORS: dict[str, type[Accelerator]] = {"cuda": Cuda}


def interface_of(device: torch.device) -> DeviceInterface:
    """The interface of a device. An accelerator without an index means the current one."""
    index: int | None = device.index  # PyTorch declares it an ``int``
    if device.type == _accelerator_type() and index is None:
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return _interface(device)


def accelerator_in_use() -> Accelerator | None:
    """The current device of the machine's accelerator if the process uses it; else ``None``."""
    kind = _accelerator_type()
    begun = None if kind is None else getattr(torch.get_device_module(kind), "is_initialized", None)
    if kind is None or begun is None or not begun():  # this query does not initialize it
        return None
    found = interface_of(torch.device(kind))
    return found if isinstance(found, Accelerator) else None


def accelerators() -> list[Accelerator]:
    """All devices of the machine's accelerator, used or not."""
    kind = _accelerator_type()
    if kind is None or not torch.accelerator.is_available():
        return []
    found = [interface_of(torch.device(kind, index)) for index in range(torch.accelerator.device_count())]
    return [each for each in found if isinstance(each, Accelerator)]


def find(device: torch.device | str) -> DeviceInterface:
    """The interface of the CPU, or of an accelerator with memory statistics, by name. Raises ``PlanError`` for other
    devices."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise PlanError(f"device={device!r} is no device: {error}") from None
    if device.type == "cpu":
        return interface_of(torch.device("cpu"))
    if device.type == "meta":
        raise PlanError("a budget is of the memory of 'cpu' or of an accelerator, not of 'meta', which has none.")
    count = torch.accelerator.device_count() if device.type == _accelerator_type() else 0
    if count == 0 or (device.index or 0) >= count:
        there = f"{count} of type {device.type!r}" if count else f"no device of type {device.type!r}"
        raise PlanError(f"device={str(device)!r}, but PyTorch finds {there} here.")
    found = interface_of(device)
    if not (isinstance(found, Accelerator) and found.has_statistics):
        raise PlanError(f"PyTorch does not tell how much memory is allocated on {device.type!r}, so it has no budget.")
    return found


def plain_types() -> tuple[str, ...]:
    """The device types on which tensors of this process can have memory."""
    kind = _accelerator_type()
    return ("cpu",) if kind is None else ("cpu", kind)


def modules() -> list[Any]:
    """PyTorch's accelerator modules that programs may use here: ``torch.cuda``, which always exists, and that of the
    machine."""
    kind = _accelerator_type()
    return [torch.cuda] if kind in (None, "cuda") else [torch.cuda, torch.get_device_module(kind)]


@functools.cache
def _interface(device: torch.device) -> DeviceInterface:
    if device.type == "cpu":
        return Cpu(torch.device("cpu"))
    if device.type == _accelerator_type():
        return _ACCELERATORS.get(device.type, Accelerator)(device)
    return DeviceInterface(device)


def _accelerator_type() -> str | None:
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type
