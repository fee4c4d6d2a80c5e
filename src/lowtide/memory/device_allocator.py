"""Arenas on accelerators: their allocators give planned allocations their places, and all else goes where it went before.

PyTorch asks an accelerator's allocator for memory by a virtual method of c10's (``c10::Allocator::allocate``), whatever
operator asks, results and workspaces alike. The extension gives that one object a copy of its table of methods in which this
one is its own: the object, its pools, its statistics and its deleters stay what they are. As on the CPU
(``memory.cpu_allocator``) c10 is known by its layout alone, which is probed before and by a test allocation after. Blocks of
arenas are memory of that allocator, and count as allocated in its statistics, whatever lies in them.

Why not otherwise: a ``torch.cuda.MemPool`` asks for segments of 2 or 20 MiB and more, and cuts them as it likes; ``out=``
variants are missing for most of what is large (convolutions, attention, norms), or allocate and copy; and a pluggable allocator
(``CUDAPluggableAllocator``) must be chosen before anything is allocated, and takes the place of caching altogether.

One stream is meant: a place is free for the next tensor as soon as the one before is gone from the program, while kernels that
read it may still be waiting in the stream. All operators of a planned pass run on one; ``record_stream`` has no effect on what
lies in an arena, such as a gradient.
"""

from __future__ import annotations

import ctypes
import functools
import logging

import torch
from torch._C._autograd import DeviceType

from lowtide.device import Accelerator, interface_of
from lowtide.memory.cpu_allocator import c10_library
from lowtide.native import core

_LOG = logging.getLogger(__name__)
_GET = "_ZN3c1012GetAllocatorERKNS_10DeviceTypeE"
_PROBE_BYTES = 1 << 12

DeviceMemory = core.DeviceMemory


@functools.cache
def device_memory(accelerator: Accelerator) -> DeviceMemory | None:
    """Memory of one device for arenas; ``None`` where this build of PyTorch allows none, which the log says."""
    return core.new_device_memory() if _install(accelerator.device.type) else None


def arena_room(accelerator: Accelerator) -> int:
    """What arenas take up of the device beside what lies in them."""
    if not _install.cache_info().currsize:  # no arena was ever asked for
        return 0
    memory = device_memory(accelerator)
    return 0 if memory is None else memory.reserved_bytes - memory.used_bytes


@functools.cache
def _install(device_type: str) -> bool:
    """Whether the allocator of the process's accelerator sends planned allocations to their places from now on."""
    device = torch.device(device_type, 0)
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)  # shows how its memory is described
    try:
        get = getattr(c10_library(), _GET)
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.POINTER(ctypes.c_int8)]
        allocator = get(ctypes.byref(ctypes.c_int8(_number(device_type))))
        if not allocator:
            raise RuntimeError(f"PyTorch tells no allocator of {device_type}")
        granularity = interface_of(device).granularity_bytes
        core.install_device_allocator(allocator, probe.untyped_storage()._cdata, probe.data_ptr(), granularity)
    except (OSError, AttributeError, RuntimeError) as error:
        _LOG.warning("arena=True has no effect on %s: %s", device_type, error)
        return False
    if not _places(device):
        core.uninstall_device_allocator()
        _LOG.warning("arena=True has no effect on %s: a test allocation went elsewhere", device_type)
        return False
    return True


def _number(device_type: str) -> int:
    """Of c10's ``DeviceType``; what is none of them has the name of a backend outside of PyTorch."""
    kinds = {name.lower(): kind for name, kind in DeviceType.__members__.items()}
    return int(kinds.get(device_type, DeviceType.PrivateUse1).value)


def _places(device: torch.device) -> bool:
    """Whether a test allocation goes to its place and leaves it."""
    memory = core.new_device_memory()
    table = core.AddressTable(core.Arena(memory), [([(0, _PROBE_BYTES)], [], (0, 0))])
    with torch.accelerator.device_index(device.index):
        if not table.reserve():
            return False
    table.begin(0)
    block = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)
    table.end()
    during = memory.used_bytes
    del block
    return (during, memory.used_bytes) == (_PROBE_BYTES, 0)
