"""A counter under PyTorch's CPU allocator: every allocation of every thread, exact to the byte, about 10 ns each.

``torch.profiler``'s memory events cover only the threads that inherited the profiler's state (a plain
``threading.Thread`` is not seen, nor is anything with ``profile_all_threads``), and miss the release of blocks that are
older than the session. Here a small allocator is put in front of c10's own through ``c10::SetCPUAllocator``: it calls
the original, notes the size in a lock-free table, and wraps the deleter, so that it sees the free wherever it happens.
It changes neither sizes nor addresses. The machine code is assembled by llvmlite, which numba needs anyway, so no
compiler is wanted on the machine.

What it relies on, probed before use and again by a test allocation after it (``install`` returns ``None`` where
anything differs): the exported ``c10::GetCPUAllocator`` and ``c10::SetCPUAllocator``; the Itanium layout of
``c10::Allocator`` (two destructors, ``allocate``, ``is_simple_data_ptr``, ``raw_deleter``, ...); ``c10::DataPtr`` as
data, then context and deleter in the standard library's order.

It can also hold a limit: an allocation of one chosen thread that would exceed it first asks a Python function to make
room, and is refused with the original allocator's own out-of-memory exception where that fails.

It stays installed for the life of the process, because blocks outlive a measurement; so do code and table. Blocks that
were allocated before it was installed are unknown: their frees are not seen, and a measurement is then too high. Blocks of no
bytes have no address; oneDNN releases such, and an empty place in the table has that address too, so they are passed over.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowtide.memory.machine_code import assemble

_LOG = logging.getLogger(__name__)

_TABLE_SLOTS = 1 << 18  # blocks alive at a time; two words each, 4 MiB, touched only as used
_PROBES = 256  # a block that finds no slot in so many is left uncounted
_VTABLE_SLOTS = 16
_ALLOCATE, _RAW_DELETER = 2, 4  # positions in c10::Allocator's vtable
_LEVEL, _PEAK, _LOG_ADDRESS, _LOG_CAPACITY, _LOG_LENGTH, _UNCOUNTED, _LIMIT, _THREAD, _STATE_WORDS = range(9)
_NO_LIMIT = (1 << 63) - 1
_REFUSED = 1 << 62  # bytes that no allocator has: the original one refuses them in its own way, with its own exception


class AllocationCounter:
    """Level and peak of the bytes that the CPU allocator has handed out since the counter was installed."""

    def __init__(self, state: Any, hook: _Hook) -> None:
        self._state = state
        self._hook = hook

    @property
    def level_bytes(self) -> int:
        return int(self._state[_LEVEL])

    @property
    def peak_bytes(self) -> int:
        return int(self._state[_PEAK])

    @property
    def uncounted_blocks(self) -> int:
        """Blocks that found no place in the table; 0 unless hundreds of thousands of tensors are alive."""
        return int(self._state[_UNCOUNTED])

    def reset_peak(self) -> int:
        """The peak falls to the present level, which is returned."""
        self._state[_PEAK] = level = self.level_bytes
        return level

    def raise_peak(self, peak_bytes: int) -> None:
        self._state[_PEAK] = max(self.peak_bytes, peak_bytes)

    def limit(self, limit_bytes: int | None, make_room: Callable[[int], bool] | None = None) -> None:
        """Hold the level at or below ``limit_bytes`` for the thread in ``limited_thread``; ``None`` lifts the limit.

        Before an allocation of n bytes would exceed it, ``make_room(n)`` is called in the allocating thread; where it
        returns false, the allocation fails as if the machine had no memory left. It must not raise, and may be called
        from inside an operator. Other threads are counted but never refused.
        """
        self._hook.make_room = make_room
        self._state[_LIMIT] = _NO_LIMIT if limit_bytes is None else limit_bytes

    @property
    def limited_thread(self) -> int:
        """``threading.get_ident()`` of the thread that the limit holds for."""
        return int(self._state[_THREAD])

    @limited_thread.setter
    def limited_thread(self, ident: int) -> None:
        self._state[_THREAD] = ident

    def start_log(self, address: int, capacity: int) -> bool:
        """From now on write (monotonic ns, level) per event to ``address``; false where a log runs already."""
        if self._state[_LOG_CAPACITY]:
            return False
        self._state[_LOG_ADDRESS] = address
        self._state[_LOG_LENGTH] = 0
        self._state[_LOG_CAPACITY] = capacity
        return True

    def stop_log(self) -> int:
        """Stop writing; the number of events seen, which may be more than were written."""
        self._state[_LOG_CAPACITY] = 0
        return int(self._state[_LOG_LENGTH])


@functools.cache
def install() -> AllocationCounter | None:
    """The process's counter, put in place on the first call; ``None`` where this build of torch does not allow it."""
    if sys.platform not in ("linux", "darwin"):
        return None
    try:
        return _install()
    except (ImportError, OSError, AttributeError, RuntimeError, ValueError) as error:
        _LOG.warning("the exact CPU allocation counter is not available: %s", error)
        return None


def _install() -> AllocationCounter:
    c10 = _load_c10()
    original = c10.get()
    vtable = _words(_words(original, 1)[0], _VTABLE_SLOTS)
    deleter, deleter_word = _probe_layout(original, vtable)
    state_address = _forever(_STATE_WORDS)
    _words(state_address, _STATE_WORDS)[_LIMIT] = _NO_LIMIT
    hook = _Hook()
    code = assemble(
        original=original,
        original_allocate=vtable[_ALLOCATE],
        original_deleter=deleter,
        deleter_word=deleter_word,
        table=_forever(2 * _TABLE_SLOTS),
        hash_shift=64 - _TABLE_SLOTS.bit_length() + 1,
        slot_mask=_TABLE_SLOTS - 1,
        probes=_PROBES,
        clock=1 if sys.platform == "linux" else 6,
        level=state_address + 8 * _LEVEL,
        peak=state_address + 8 * _PEAK,
        log_address=state_address + 8 * _LOG_ADDRESS,
        log_capacity=state_address + 8 * _LOG_CAPACITY,
        log_length=state_address + 8 * _LOG_LENGTH,
        uncounted=state_address + 8 * _UNCOUNTED,
        limit=state_address + 8 * _LIMIT,
        thread=state_address + 8 * _THREAD,
        make_room=hook.address,
        refused=_REFUSED,
    )
    counter = AllocationCounter(_words(state_address, _STATE_WORDS), hook)
    c10.set(_allocator_object(vtable, code), 0)
    if not _counts(counter):
        c10.set(original, 0)
        raise RuntimeError("a test allocation was not counted")
    return counter


class _Hook:
    """What the machine code calls where the limit would be exceeded; lives as long as the process."""

    def __init__(self) -> None:
        self.make_room: Callable[[int], bool] | None = None
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)(self._ask)
        self.address = int(ctypes.cast(self._entry, ctypes.c_void_p).value or 0)

    def _ask(self, wanted_bytes: int) -> int:
        return 1 if self.make_room is None or self.make_room(wanted_bytes) else 0


class _C10:
    """The two exported functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.get = library._ZN3c1015GetCPUAllocatorEv
        self.get.restype = ctypes.c_void_p
        self.get.argtypes = ()
        self.set = library._ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh
        self.set.restype = None
        self.set.argtypes = (ctypes.c_void_p, ctypes.c_uint8)


def _load_c10() -> _C10:
    name = "libc10.so" if sys.platform == "linux" else "libc10.dylib"
    return _C10(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)))


def _words(address: int, count: int) -> Any:
    return (ctypes.c_int64 * count).from_address(address)


def _forever(words: int) -> int:
    """Zeroed memory that is never given back: blocks may be freed after the interpreter is gone."""
    calloc = ctypes.CDLL(None).calloc
    calloc.restype = ctypes.c_void_p
    calloc.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
    address = calloc(words, 8)
    if not address:
        raise RuntimeError("no memory for the counter's table")
    return int(address)


def _probe_layout(original: int, vtable: Any) -> tuple[int, int]:
    """The original deleter, and at which word of a ``DataPtr`` it stands; ``RuntimeError`` where the layout is another.

    Looks at the ``DataPtr`` inside a fresh tensor's ``StorageImpl``: there the words data, context and deleter follow
    one another, and ``raw_deleter()`` must be one of them.
    """
    raw_deleter = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(vtable[_RAW_DELETER])(original)
    tensor = torch.empty(64, dtype=torch.uint8)
    storage = _words(tensor.untyped_storage()._cdata, 8)
    data = tensor.data_ptr()
    for first in range(2, 6):
        found = list(storage[first : first + 3])
        if found == [data, raw_deleter, data]:
            return int(raw_deleter), 1
        if found == [data, data, raw_deleter]:
            return int(raw_deleter), 2
    raise RuntimeError("the layout of c10::DataPtr is not the expected one")


def _allocator_object(original_vtable: Any, code: dict[str, int]) -> int:
    """A ``c10::Allocator`` with the original's vtable except for the two functions replaced."""
    vtable = _forever(_VTABLE_SLOTS)
    _words(vtable, _VTABLE_SLOTS)[:] = original_vtable[:]
    _words(vtable, _VTABLE_SLOTS)[_ALLOCATE] = code["allocate"]
    _words(vtable, _VTABLE_SLOTS)[_RAW_DELETER] = code["raw_deleter"]
    instance = _forever(8)
    _words(instance, 1)[0] = vtable
    return instance


def _counts(counter: AllocationCounter) -> bool:
    before = counter.level_bytes
    block = torch.empty(12345, dtype=torch.uint8)
    during = counter.level_bytes
    del block
    return during - before == 12345 and counter.level_bytes == before
