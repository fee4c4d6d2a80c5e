"""A counter under PyTorch's CPU allocator: counts every allocation of every thread, exact to the byte, at about 10 ns
each.

The memory events of ``torch.profiler`` miss threads that did not inherit the profiler's state, and frees of blocks
older than the session. Here a small allocator in the extension is put in front of c10's by ``c10::SetCPUAllocator``. It
calls the original, notes the size in a lock-free table, and wraps the deleter, so that it sees the free in any thread.
Sizes and addresses do not change. It can also enforce a limit for one thread: an allocation that would exceed it first
asks a Python function to make room, and otherwise fails with the original's out-of-memory exception.

It relies on the layout of c10's classes, which is probed before use and by a test allocation after (``install`` returns
``None`` if anything differs): the exported ``c10::GetCPUAllocator`` and ``c10::SetCPUAllocator``; the Itanium layout of
``c10::Allocator`` (two destructors, ``allocate``, ``is_simple_data_ptr``, ``raw_deleter``, ...); ``c10::DataPtr`` as
data, then context and deleter.

It stays installed for the life of the process, because blocks outlive a measurement. Frees of blocks older than the
installation are not seen, so a measurement may be too high. Blocks of zero bytes, such as oneDNN frees, have no address
and are ignored.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from pathlib import Path

import torch

from lowtide.native import core

_LOG = logging.getLogger(__name__)
_LIBRARIES = {"linux": "libc10.so", "darwin": "libc10.dylib"}
_GET, _SET = "_ZN3c1015GetCPUAllocatorEv", "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh"

AllocationCounter = core.AllocationCounter


@functools.cache
def install() -> AllocationCounter | None:
    """The process's counter, installed on the first call; ``None`` if this build of PyTorch does not allow it."""
    if sys.platform not in _LIBRARIES:
        return None
    try:
        return _install()
    except (OSError, AttributeError, RuntimeError) as error:
        _LOG.warning("the exact CPU allocation counter is not available: %s", error)
        return None


def c10_library() -> ctypes.CDLL:
    """PyTorch's c10 library, which contains its allocators. Raises ``OSError`` if there is none with the known
    layout."""
    if sys.platform not in _LIBRARIES:
        raise OSError(f"allocators of PyTorch have another layout on {sys.platform}")
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _LIBRARIES[sys.platform]))


def _install() -> AllocationCounter:
    library = c10_library()
    functions = _address(getattr(library, _GET)), _address(getattr(library, _SET))
    tensor = torch.empty(64, dtype=torch.uint8)  # a probe for the layout of c10's classes
    counter = core.install_counter(functions, tensor.untyped_storage()._cdata, tensor.data_ptr())
    if not _counts(counter):
        core.uninstall_counter(functions)
        raise RuntimeError("a test allocation was not counted")
    return counter


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


def _counts(counter: AllocationCounter) -> bool:
    before = counter.level_bytes
    block = torch.empty(12345, dtype=torch.uint8)
    during = counter.level_bytes
    del block
    return during - before == 12345 and counter.level_bytes == before
