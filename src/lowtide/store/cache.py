"""A folder of entries: JSON documents under keys, in a file each, with the digest of what was written."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import filelock
import msgspec
import platformdirs

from lowtide.errors import LowtideError, PlanError
from lowtide.store.files import LEFTOVER_SUFFIXES, by_last_use, mark_used, read_regular, sweep, write_atomically

_LOG = logging.getLogger(__name__)
_MOST_BYTES = 1 << 28  # of an entry
_POLL_SECONDS = 0.05
# What reading and decoding a file of any content raises.
_ODD = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, LowtideError)

Entry = TypeVar("Entry")
Stamp = tuple[int, int] | None


def cache_folder() -> Path:
    """The folder of all caches: ``LOWTIDE_CACHE_DIR``, or the platform's."""
    chosen = os.environ.get("LOWTIDE_CACHE_DIR")
    return Path(os.path.expanduser(chosen)) if chosen else Path(platformdirs.user_cache_dir("lowtide"))


class _Envelope(msgspec.Struct, frozen=True):
    format: str
    sha256: str
    entry: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Cache:
    """Entries of one ``format`` in one folder; where they have become an eighth more than ``most_entries``, those used least
    recently go. Any number of processes may share the folder: a file is replaced in one step. No method raises for what the
    disk does or holds: what cannot be read is not there, what cannot be written is not kept, and the log says so."""

    folder: Path
    format: str
    most_entries: int

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str, decode: Callable[[bytes], Entry]) -> Entry | None:
        """The entry of ``key``, which ``decode`` makes of its JSON; ``None`` where there is none that is sound.

        ``decode`` raises ``ValueError`` (as msgspec does) or a ``LowtideError`` for a document that it did not write.
        """
        path = self.path(key)
        try:
            envelope = msgspec.json.decode(read_regular(path, _MOST_BYTES), type=_Envelope)
            if envelope.format != self.format:
                raise ValueError(f"its format is not {self.format}")
            document = bytes(envelope.entry)
            if envelope.sha256 != hashlib.sha256(document).hexdigest():
                raise ValueError("it is damaged")
            entry = decode(document)
        except FileNotFoundError:
            return None
        except _ODD as error:
            _LOG.warning("ignoring %s: %s", path, error)
            return None
        mark_used(path)
        return entry

    def put(self, key: str, document: Any) -> bool:
        """Keep ``document``, which msgspec can write as JSON, as the entry of ``key``. Whether that could be done."""
        entry = msgspec.json.encode(document)
        envelope = _Envelope(self.format, hashlib.sha256(entry).hexdigest(), msgspec.Raw(entry))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.path(key)
            if path.exists() and not path.is_file():  # a pipe waits for somebody who reads it
                raise PlanError(f"{path} is not a file.")
            write_atomically(path, msgspec.json.encode(envelope))
            self._tidy()
        except (OSError, LowtideError) as error:
            _LOG.warning("%s entries cannot be kept in %s: %s", self.format, self.folder, error)
            return False
        return True

    def _tidy(self) -> None:
        """Remove entries where there are too many, and what processes that were killed have left. Raises ``OSError``."""
        names = os.listdir(self.folder)  # of which few are looked at: this comes after every entry
        entries = [name for name in names if name.endswith(".json")]
        if len(entries) > self.most_entries + self.most_entries // 8:
            for path in by_last_use(map(self.folder.joinpath, entries))[self.most_entries :]:
                path.unlink(missing_ok=True)
        sweep(self.folder / name for name in names if name.endswith(LEFTOVER_SUFFIXES))

    def get_or_make(
        self,
        key: str,
        decode: Callable[[bytes], Entry],
        make: Callable[[], Entry],
        encode: Callable[[Entry], Any],
        patience_seconds: float,
    ) -> Entry:
        """The entry of ``key``; where there is none, that of ``make``, which is kept. Of processes that ask at the same
        time one makes it. The others wait ``patience_seconds`` at most, then make their own."""
        stamp = self.stamp(key)
        found = self.get(key, decode)
        if found is not None:
            return found
        with self.making(key, patience_seconds):
            if self.stamp(key) != stamp:
                found = self.get(key, decode)
            if found is None:
                found = make()
                self.put(key, encode(found))
            return found

    @contextlib.contextmanager
    def making(self, key: str, patience_seconds: float) -> Iterator[None]:
        """Inside, no other process makes the entry of ``key``, for which there is a lock file meanwhile. A process that
        is killed lets go. One that has waited ``patience_seconds``, or cannot lock files here, goes on without."""
        path = self.folder / f"{key}.lock"
        lock = filelock.FileLock(path)
        try:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
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

    def stamp(self, key: str) -> Stamp:
        """Changes whenever an entry is written; ``None`` where there is none."""
        try:
            found = os.stat(self.path(key))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
