"""Files that the forward pass opens: a program is good as long as they are what they were when it was captured."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

_CODE = (".pyc", ".so", ".pyd", ".dll")
_READING = ("open", "os.listdir", "os.scandir")  # events
_SYSTEM = ("/proc/", "/sys/", "/dev/", "/etc/")
_watching = threading.local()


@contextlib.contextmanager
def opened(found: dict[str, Any]) -> Iterator[None]:
    """Inside, files that this thread opens, and folders that it lists, are noted in ``found``, with their states. Libraries,
    devices, what is installed, and files that compilers leave in temporary folders are not: they are no data of its."""
    _install()
    outer = getattr(_watching, "found", None)
    _watching.found = found
    try:
        yield
    finally:
        _watching.found = outer


def state_of(path: str) -> Any:
    """Changes where a file is written or replaced; ``None`` where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@functools.cache
def _install() -> None:
    sys.addaudithook(_note)  # it stays for the life of the process, and does nothing outside of ``opened``


def _note(event: str, args: tuple[Any, ...]) -> None:
    if not _READING or event not in _READING:  # at the end of the process names of modules are gone
        return
    found = getattr(_watching, "found", None)
    if found is None or not isinstance(args[0], (str, bytes, os.PathLike)):
        return
    path = os.fsdecode(args[0])  # as given: another working folder has another file there
    if not path.endswith(_CODE) and not os.path.abspath(path).startswith((*_SYSTEM, *_installed())):
        found.setdefault(path, state_of(path))


@functools.cache
def _installed() -> tuple[str, ...]:
    compilers = os.path.join(tempfile.gettempdir(), "torchinductor_")
    return (*{sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}, sys.prefix, compilers)
