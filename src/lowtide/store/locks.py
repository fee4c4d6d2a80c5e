"""Locks between processes: one makes something, the others wait for it, for a while."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import filelock

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.05


@contextlib.contextmanager
def locked(path: Path, patience_seconds: float) -> Iterator[None]:
    """Inside, no other process is inside with the same ``path``, a file that is there meanwhile.

    A process that is killed lets go. One that has waited ``patience_seconds``, or cannot lock files here, goes on without.
    """
    lock = filelock.FileLock(path)
    try:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=patience_seconds, poll_interval=_POLL_SECONDS)
    except filelock.Timeout:
        _LOG.warning("%s is held by another process for %.0f s; not waiting any longer", path, patience_seconds)
    except (OSError, NotImplementedError, RuntimeError) as error:
        _LOG.info("%s cannot be locked: %s", path, error)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.unlink()
            with contextlib.suppress(OSError):
                lock.release()
