"""Arenas on accelerators: planned allocations get their places from the accelerator's allocator, all others work as
before.

PyTorch asks an accelerator's allocator for memory by a virtual method of c10 (``c10::Allocator::allocate``), for
results and workspaces alike. The extension gives that one object a copy of its method table with this entry replaced.
The object, its pools, statistics and deleters stay as they are. As on the CPU (``memory.cpu_allocator``), the layout of
c10's classes is probed before, and by a test allocation after. The blocks of arenas come from that allocator and count
as allocated in its statistics.

Alternatives that do not work: ``torch.cuda.MemPool`` asks for segments of 2 or 20 MiB and more, and splits them freely.
``out=`` variants are missing for most large operators (convolutions, attention, norms), or allocate and copy. A
pluggable allocator (``CUDAPluggableAllocator``) must be chosen before any allocation, and replaces caching altogether.

This assumes one stream: a place is reused as soon as the program has dropped the former tensor, while kernels that read
it may still wait in the stream. All operators of a planned pass run on one stream. ``record_stream`` has no effect on
tensors in an arena, such as gradients.
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
    """The source of memory of one device for arenas; ``None``, with a warning in the log, if this build of PyTorch
    allows none."""
    return core.new_device_memory() if _install(accelerator.device.type) else None


def arena_room(accelerator: Accelerator) -> int:
    """Bytes of the device that arenas take beside the tensors in them."""
    if not _install.cache_info().currsize:  # no arena was ever requested
        return 0
    memory = device_memory(accelerator)
    return 0 if memory is None else memory.reserved_bytes - memory.used_bytes


@functools.cache
def _install(device_type: str) -> bool:
    """Install the replaced method. Returns whether planned allocations now go to their places."""
    device = torch.device(device_type, 0)
    probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device)  # for the layout of c10's classes
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
    """The ``DeviceType`` of c10; other names are backends outside PyTorch."""
    kinds = {name.lower(): kind for name, kind in DeviceType.__members__.items()}
    return int(kinds.get(device_type, DeviceType.PrivateUse1).value)


def _places(device: torch.device) -> bool:
    """Whether a test allocation goes to its place, and frees it."""
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
