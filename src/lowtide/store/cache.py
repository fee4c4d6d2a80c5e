"""A folder of entries: JSON documents by key, one file each, with the digest of the content."""

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
_MOST_BYTES = 1 << 28  # most bytes of an entry
_POLL_SECONDS = 0.05
# Errors of reading and decoding files with arbitrary content.
_ODD = (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, LowtideError)

Entry = TypeVar("Entry")
Stamp = tuple[int, int] | None


def cache_folder() -> Path:
    """The folder of all caches: ``LOWTIDE_CACHE_DIR``, or the platform's default."""
    chosen = os.environ.get("LOWTIDE_CACHE_DIR")
    return Path(os.path.expanduser(chosen)) if chosen else Path(platformdirs.user_cache_dir("lowtide"))


class _Envelope(msgspec.Struct, frozen=True):
    format: str
    sha256: str
    entry: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Cache:
    """Entries of one ``format`` in one folder. When there are an eighth more than ``most_entries``, the least recently
    used ones are removed. Several processes may share the folder: files are replaced atomically. No method raises for
    the disk's state: what cannot be read counts as missing, what cannot be written is not kept, and the log says so."""

    folder: Path
    format: str
    most_entries: int

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str, decode: Callable[[bytes], Entry]) -> Entry | None:
        """The entry of ``key``, made by ``decode`` from its JSON; ``None`` if there is no valid one.

        ``decode`` raises ``ValueError`` (as msgspec does) or a ``LowtideError`` for a foreign document.
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
        """Store ``document``, which msgspec can write as JSON, as the entry of ``key``. Returns whether this
        succeeded."""
        entry = msgspec.json.encode(document)
        envelope = _Envelope(self.format, hashlib.sha256(entry).hexdigest(), msgspec.Raw(entry))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.path(key)
            if path.exists() and not path.is_file():  # writing to a pipe would block
                raise PlanError(f"{path} is not a file.")
            write_atomically(path, msgspec.json.encode(envelope))
            self._tidy()
        except (OSError, LowtideError) as error:
            _LOG.warning("%s entries cannot be kept in %s: %s", self.format, self.folder, error)
            return False
        return True

    def _tidy(self) -> None:
        """Remove surplus entries, and leftovers of killed processes. Raises ``OSError``."""
        names = os.listdir(self.folder)  # names only: this runs after every write
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
        """The entry of ``key``, else the result of ``make``, which is stored. If several processes ask at once, one
        makes it. The others wait at most ``patience_seconds``, then make their own."""
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
        """A context in which no other process makes the entry of ``key``, by a lock file. The lock of a killed process
        is released. After ``patience_seconds``, or if locks do not work here, it proceeds without a lock."""
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
        """A value that changes whenever the entry is written; ``None`` if there is none."""
        try:
            found = os.stat(self.path(key))
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns
