"""A file on a local disk as second memory for models on the CPU.

The file has no name, so it disappears when the process ends in any way. Its bytes are reserved before a pass begins.
One thread reads and writes it, bypassing the page cache if the file system allows that, through an aligned buffer of a
few megabytes.

``LOWTIDE_OFFLOAD_CHECKSUMS=1`` checks every storage that comes back by CRC-32.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import platform
import queue
import re
import tempfile
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from lowtide.errors import ExecutionError
from lowtide.offload.interface import ALIGNMENT, Copy, Lease, SecondMemoryOf, bytes_of
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
_CHUNK = 8 << 20
_DIRECT = getattr(os, "O_DIRECT", 0)
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class _Job:
    """A transfer for the thread of ``process``. ``error``: why it failed."""

    work: Callable[[Bytes], None]
    process: int
    done: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def wait(self, doing: str) -> None:
        if not self.done.is_set() and self.process != os.getpid():  # this process lacks the thread: do not wait forever
            self.error = "the process was forked during the pass, and threads are not; begin a pass after the fork"
        else:
            self.done.wait()
        if self.error is not None:
            raise ExecutionError(f"{doing} the file that tensors are offloaded to: {self.error}.")


class DiskMemory(SecondMemoryOf):
    """A file in ``folder``. Raises ``ExecutionError`` if it cannot be created."""

    shared = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.checksums = os.environ.get("LOWTIDE_OFFLOAD_CHECKSUMS", "") not in ("", "0")
        self._file, self.direct = _nameless_file(folder)
        if _is_in_memory(self._file):
            _LOG.warning(
                "files in %s are kept in memory, where what is offloaded takes as much as before; name one on a disk, as in "
                'offload="disk:/scratch"', folder,
            )  # fmt: skip
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._size = 0
        self._free: list[tuple[int, int]] = []  # free ranges as (offset, size), in order
        self._given_back: deque[tuple[int, int]] = deque()
        self._process = os.getpid()
        # Not at exit: transfers may still run, and the descriptor of a closed file may be reused.
        weakref.finalize(self, self._jobs.put, None).atexit = False
        buffer = np.frombuffer(mmap.mmap(-1, _CHUNK), np.uint8)
        mover = threading.Thread(target=_work, args=(self._jobs, self._file, buffer), name="lowtide disk", daemon=True)
        try:
            mover.start()
        except RuntimeError as error:
            raise ExecutionError(f"no thread can be started that offloads tensors: {error}.") from error

    def lease(self, nbytes: int) -> DiskLease:
        nbytes = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._join()
            last = self._free[-1] if self._free and sum(self._free[-1]) == self._size else (self._size, 0)
            fitting = [one for one in self._free if one[1] >= nbytes]
            found = min(fitting, key=lambda one: one[1], default=last)
            offset, room = found
            if room < nbytes:
                self._reserve(nbytes, nbytes - room)
            rest = [(offset + nbytes, room - nbytes)] if room > nbytes else []
            self._free = sorted([*(one for one in self._free if one is not found), *rest])
        return DiskLease(self, offset, nbytes)

    def _join(self) -> None:
        """Merge returned ranges with adjacent free ones, so that they can be reused for any size."""
        given_back = [self._given_back.popleft() for _ in range(len(self._given_back))]
        joined: list[tuple[int, int]] = []
        for offset, nbytes in sorted([*self._free, *given_back]):
            if joined and sum(joined[-1]) == offset:
                offset, nbytes = joined[-1][0], joined.pop()[1] + nbytes
            joined.append((offset, nbytes))
        self._free = joined

    def _reserve(self, nbytes: int, more: int) -> None:
        """Grow the file by ``more`` bytes, for a pass that moves ``nbytes``."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, self._size, more)
            else:  # a full disk is then an error of a later write
                os.ftruncate(self._file, self._size + more)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            free = f", which has {format_bytes(self.free_bytes())} free" if full else ""
            raise ExecutionError(
                f"a pass moves {nbytes} bytes ({format_bytes(nbytes)}) to a file in {self.folder}{free}: "
                f'{error.strerror}. Name another folder with offload="disk:/folder", or give a smaller offload_budget=.'
            ) from error
        self._size += more

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a range. Takes no lock, because the garbage collector may call it at any point in any thread."""
        self._given_back.append((offset, nbytes))

    def free_bytes(self) -> int:
        own = sum(nbytes for _, nbytes in [*self._free, *self._given_back])
        there = os.fstatvfs(self._file)  # by file: the folder's path may lead elsewhere now
        return there.f_bavail * there.f_frsize + own

    def identity(self) -> tuple[str, ...]:
        return platform.node(), str(os.fstat(self._file).st_dev), str(self.direct)

    def write(self, offset: int, memory: Bytes) -> _Job:
        """Begin to write ``memory`` at ``offset``."""
        return self._begin(offset, memory, self._write)

    def read(self, offset: int, memory: Bytes) -> _Job:
        """Begin to read from ``offset`` into ``memory``."""
        return self._begin(offset, memory, self._read)

    def _begin(self, offset: int, memory: Bytes, move: Callable[[int, Bytes, Bytes], None]) -> _Job:
        """A job that moves ``memory`` in chunks through the buffer. It keeps no reference once it is done."""
        held = [memory]

        def work(buffer: Bytes) -> None:
            whole = held.pop()
            for begin in range(0, len(whole), _CHUNK):
                part = whole[begin : begin + _CHUNK]
                move(offset + begin, part, buffer[: -(-len(part) // ALIGNMENT) * ALIGNMENT])

        return self.begin(work)

    def begin(self, work: Callable[[Bytes], None]) -> _Job:
        """Queue ``work`` for the thread, which calls it with its buffer after all earlier jobs."""
        job = _Job(work, self._process)
        self._jobs.put(job)
        return job

    def _write(self, offset: int, part: Bytes, buffer: Bytes) -> None:
        buffer[: len(part)] = part
        done = 0
        while done < len(buffer):
            done += os.pwrite(self._file, buffer[done:], offset + done)  # type: ignore[arg-type]
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, offset, len(buffer), os.POSIX_FADV_DONTNEED)

    def _read(self, offset: int, part: Bytes, buffer: Bytes) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)  # type: ignore[list-item]
            if count == 0:
                raise OSError(errno.EIO, "the file is shorter than what was written to it")
            done += count
        part[:] = buffer[: len(part)]


class DiskLease(Lease):
    def __init__(self, memory: DiskMemory, offset: int, nbytes: int) -> None:
        super().__init__(memory.give_back, offset, nbytes)
        self.memory, self.offset = memory, offset

    def offload(self, offset: int, values: Sequence[torch.Tensor]) -> DiskCopy:
        return DiskCopy(self, self.offset + offset, values)


class DiskCopy(Copy):
    def __init__(self, lease: DiskLease, offset: int, values: Sequence[torch.Tensor]) -> None:
        super().__init__(values)
        self.lease, self.offset = lease, offset
        memory = _memory_of(values[0].untyped_storage())
        self.checksum = zlib.crc32(memory.data) if lease.memory.checksums else None
        self._out = lease.memory.write(offset, memory)
        self._in: tuple[_Job, Bytes] | None = None

    def left(self) -> None:
        self._out.wait(f"{format_bytes(self.bytes)} could not be written to")

    def _begin(self, storage: torch.UntypedStorage) -> None:
        memory = _memory_of(storage)
        self._in = self.lease.memory.read(self.offset, memory), memory

    def back(self) -> None:
        assert self._in is not None
        (job, memory), self._in = self._in, None
        job.wait(f"{format_bytes(self.bytes)} could not be read back from")
        if self.checksum is not None and zlib.crc32(memory.data) != self.checksum:
            raise ExecutionError(
                f"{format_bytes(self.bytes)} that were offloaded to a file in {self.lease.memory.folder} came back otherwise "
                'than they went. The disk is not to be trusted; name another with offload="disk:/folder".'
            )

    def settle(self) -> None:
        self.left()
        if self._in is not None:
            self.back()


def _memory_of(storage: torch.UntypedStorage) -> Bytes:
    """The bytes of a CPU storage as an array, which keeps the storage alive."""
    memory: Bytes = bytes_of(storage).numpy()
    return memory


def _work(jobs: queue.SimpleQueue[_Job | None], file: int, buffer: Bytes) -> None:
    """The thread's loop: one transfer after the other. An error is stored in its job, for the code that waits for
    it."""
    while (job := jobs.get()) is not None:
        try:
            job.work(buffer)
        except OSError as error:
            job.error = error.strerror or str(error)
        except BaseException as error:  # noqa: BLE001 - the thread goes on
            job.error = f"{type(error).__name__}: {error}"
        del job.work
        job.done.set()
        del job  # do not keep it alive while waiting for the next
    os.close(file)


def _nameless_file(folder: str) -> tuple[int, bool]:
    """A file without a name, and whether it bypasses the page cache. Raises ``ExecutionError``."""
    if not hasattr(os, "preadv"):
        raise ExecutionError('offload="disk" needs a system that has preadv, such as Linux, and this one does not.')
    flags = os.O_RDWR | getattr(os, "O_TMPFILE", 0)
    try:
        if getattr(os, "O_TMPFILE", 0):
            for direct in (_DIRECT, 0) if _DIRECT else (0,):
                try:
                    return os.open(folder, flags | direct, 0o600), bool(direct)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                        raise
        file, path = tempfile.mkstemp(prefix="lowtide-", dir=folder)
        os.unlink(path)
        return file, False
    except OSError as error:
        raise ExecutionError(
            f"no file can be made in {folder} to offload tensors to: {error.strerror or error}. Name a folder on a local disk, "
            'as in offload="disk:/scratch".'
        ) from error


def _is_in_memory(file: int) -> bool:
    """Whether the file system of the file is in memory, as that of /tmp often is on Linux."""
    device = os.fstat(file).st_dev
    numbers = f" {os.major(device)}:{os.minor(device)} "
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        return any(numbers in mount and re.search(" - (tmpfs|ramfs) ", mount) for mount in mounts)
    return False
