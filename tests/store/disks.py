"""Folders on disks that are full."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full_disk(folder: Path) -> Iterator[None]:
    """Inside, nothing can be written to files in ``folder``: on a small file system of its own where that may be mounted, else
    by the process's limit on the size of files. Both end in an ``OSError`` of the kernel."""
    folder.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "full", folder], capture_output=True, check=False
    )
    if mounted.returncode == 0:
        try:
            with contextlib.suppress(OSError), open(folder / "filling", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(1024))
            yield
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
