"""Measured operator costs on disk: one JSON file per device and torch version, shared by all processes.

The folder is ``LOWTIDE_CACHE_DIR`` or the platform's cache folder. Writing reads the file again, adds what others have
put there meanwhile, and replaces it in one step, under a lock file where the platform has locks. A file that is not
ours is ignored with a log line and rewritten.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_LOG = logging.getLogger(__name__)
FORMAT = "lowtide-costs/3"


@dataclass(frozen=True, slots=True)
class Record:
    """What was measured of one signature.

    ``output_bytes[i]`` is the size of the real storage behind output i, 0 where it is the storage of an argument;
    ``output_groups[i]`` tells outputs of one storage by equal numbers, -1 where it is an argument's.
    ``peak_bytes`` is the allocator's peak inside the call, results included.
    """

    time_ns: int
    spread_ns: int
    peak_bytes: int
    output_bytes: tuple[int, ...]
    output_groups: tuple[int, ...]

    def to_json(self) -> list[Any]:
        return [self.time_ns, self.spread_ns, self.peak_bytes, list(self.output_bytes), list(self.output_groups)]

    @staticmethod
    def from_json(row: Any) -> Record:
        """Raises ``ValueError`` or ``TypeError`` where the row is not one that ``to_json`` made."""
        time_ns, spread_ns, peak_bytes, output_bytes, output_groups = row
        record = Record(time_ns, spread_ns, peak_bytes, tuple(output_bytes), tuple(output_groups))
        numbers = (time_ns, spread_ns, peak_bytes, *record.output_bytes, *record.output_groups)
        if not all(type(number) is int and number >= -1 for number in numbers):
            raise ValueError(f"not a cost record: {row!r}")
        if len(record.output_bytes) != len(record.output_groups):
            raise ValueError(f"not a cost record: {row!r}")
        return record


@dataclass(slots=True)
class CostCache:
    """Records by signature. ``path`` is ``None`` for a cache that lives in memory only."""

    path: Path | None
    records: dict[str, Record] = field(default_factory=dict)
    _unsaved: dict[str, Record] = field(default_factory=dict)

    @staticmethod
    def open(device: torch.device) -> CostCache:
        """The shared cache of this device and torch version, read from disk."""
        path = cache_folder() / f"costs-{_slug(device_name(device))}-torch-{_slug(torch.__version__)}.json"
        return CostCache(path, _read(path))

    def get(self, key: str) -> Record | None:
        return self.records.get(key)

    def put(self, key: str, record: Record, *, keep: bool = True) -> None:
        """Add a record; with ``keep`` false it is not written to disk."""
        self.records[key] = record
        if keep:
            self._unsaved[key] = record

    def save(self) -> None:
        """Write what is new. A folder that cannot be written to is logged, not raised: the cache is a convenience."""
        if self.path is None or not self._unsaved:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                merged = _read(self.path) | self._unsaved
                _replace(self.path, {"format": FORMAT, "records": {k: r.to_json() for k, r in sorted(merged.items())}})
        except OSError as error:
            _LOG.warning("measured costs cannot be kept in %s: %s", self.path, error)
            return
        self._unsaved.clear()


def cache_folder() -> Path:
    chosen = os.environ.get("LOWTIDE_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("lowtide"))


def device_name(device: torch.device) -> str:
    """The device as its maker names it; for a CPU with the number of cores that the process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu {_processor()} {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}"


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _slug(text: str) -> str:
    """A file name: readable, and distinct for distinct texts."""
    readable = "".join(character if character.isalnum() or character in ".+" else "-" for character in text)[:60]
    return f"{readable.lower()}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _read(path: Path) -> dict[str, Record]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return {str(key): Record.from_json(row) for key, row in data["records"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        _LOG.warning("ignoring the cost cache %s: %s", path, error)
        return {}


def _replace(path: Path, data: dict[str, Any]) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=0)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
