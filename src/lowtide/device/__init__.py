"""Everything that lowtide needs of devices: names, sizes and levels of memory, clocks, generators. A new accelerator is
one file here."""

from lowtide.device.accelerator import Accelerator
from lowtide.device.interface import DeviceInterface
from lowtide.device.registry import accelerator_in_use, accelerators, find, interface_of, modules, plain_types

__all__ = [
    "Accelerator",
    "DeviceInterface",
    "accelerator_in_use",
    "accelerators",
    "find",
    "interface_of",
    "modules",
    "plain_types",
]
