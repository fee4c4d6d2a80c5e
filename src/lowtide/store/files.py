"""Write files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from lowtide.errors import PlanError

LEFTOVER_SECONDS = 3600  # longer than any write or wait
LEFTOVER_SUFFIXES = (".tmp", ".lock")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that readers see the old or the new content, never a part. Raises ``PlanError``. Links are
    followed. Existing pipes and devices are written directly."""
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, target)
    except OSError as error:
        raise PlanError(f"cannot write {path}: {error.strerror or error}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises ``OSError``, and ``ValueError`` if it is not a file or has more than
    ``most_bytes``."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size} bytes, more than any entry")
    return path.read_bytes()


def by_last_use(paths: Iterable[Path]) -> list[Path]:
    """The existing ``paths``, most recently used first."""
    times: list[tuple[int, Path]] = []
    for path in paths:
        with contextlib.suppress(OSError):
            found = path.lstat()
            times.append((max(found.st_atime_ns, found.st_mtime_ns), path))
    return [path for _, path in sorted(times, reverse=True)]


def mark_used(path: Path) -> None:
    """Set the access time of ``path`` to now, without changing its modification time."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def sweep(leftovers: Iterable[Path]) -> None:
    """Remove half-written files and locks that are so old that their process must have been killed."""
    for path in leftovers:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > LEFTOVER_SECONDS:
                path.unlink()
