"""Measured operator costs on disk: one file per device and PyTorch version, shared by all processes.

One process measures at a time. Others wait for it and then read its results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from lowtide.cost.devices import device_name
from lowtide.store import Cache, cache_folder, content_key
from lowtide.store.cache import Stamp

FORMAT = "lowtide-costs/4"
PATIENCE_SECONDS = 120.0  # to wait for another process
_MOST_FILES = 32
_MOST_OPERATORS = 50_000  # per file
Amount = Annotated[int, Meta(ge=0, le=1 << 50)]  # a pebibyte, or 13 days; sums over a graph fit in 64 bits
Group = Annotated[int, Meta(ge=-1, le=1 << 20)]


class OperatorCost(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """The measurement of one signature.

    ``output_bytes[i]``: size of the storage behind output i, 0 if it is an argument's. ``output_groups[i]``: equal
    numbers for outputs in one storage, -1 for an argument's. ``peak_bytes``: the allocator's peak during the call,
    results included.
    """

    time_ns: Amount
    spread_ns: Amount
    peak_bytes: Amount
    output_bytes: tuple[Amount, ...]
    output_groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if len(self.output_bytes) != len(self.output_groups):
            raise ValueError(f"{len(self.output_bytes)} outputs in {len(self.output_groups)} groups")


@dataclass(slots=True)
class CostCache:
    """Costs by signature. ``entries`` is ``None`` for a cache in memory only."""

    entries: Cache | None
    key: str = ""
    costs: dict[str, OperatorCost] = field(default_factory=dict)
    _kept: dict[str, OperatorCost] = field(default_factory=dict)  # content of the file when last read
    _unsaved: dict[str, OperatorCost] = field(default_factory=dict)
    _stamp: Stamp = None

    @staticmethod
    def open(device: torch.device) -> CostCache:
        """The shared cache of this device and PyTorch version, read from disk."""
        name, version = device_name(device), torch.__version__
        key = f"costs-{_readable(name)}-torch-{_readable(version)}-{content_key(name, str(version))[:12]}"
        entries = Cache(cache_folder() / "costs", FORMAT, _MOST_FILES)
        cache = CostCache(entries, key)
        cache._read(entries)
        return cache

    def get(self, signature: str, outputs: int) -> OperatorCost | None:
        """The cost of an operator with so many outputs; ``None`` if it is unknown or has another number of outputs."""
        found = self.costs.get(signature)
        return found if found is not None and len(found.output_bytes) == outputs else None

    def put(self, signature: str, cost: OperatorCost, *, keep: bool = True) -> None:
        """Add a cost. With ``keep=False`` it is not written to disk."""
        self.costs[signature] = cost
        if keep:
            self._unsaved[signature] = cost

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """A context in which no other process measures, and results of other processes are known. New costs are saved
        at its end."""
        if self.entries is None:
            yield
            return
        with self.entries.making(self.key, PATIENCE_SECONDS):
            self._read(self.entries)
            yield
            if not self._unsaved:
                return
            self._read(self.entries)
            others = {key: cost for key, cost in self._kept.items() if key not in self._unsaved}
            every = others | self._unsaved  # latest measurements last
            self._kept = dict([*every.items()][-_MOST_OPERATORS:])
            if self.entries.put(self.key, self._kept):
                self._stamp, self._unsaved = self.entries.stamp(self.key), {}
                _latest[self.entries.path(self.key)] = self._stamp, self._kept

    def save(self) -> None:
        """Write new costs, in addition to those that others have written meanwhile."""
        with self.measuring():
            pass

    def _read(self, entries: Cache) -> None:
        """Read the file if it has changed."""
        stamp, path = entries.stamp(self.key), entries.path(self.key)
        if stamp == self._stamp:
            return
        known = _latest.get(path)
        if known is None or known[0] != stamp:
            known = stamp, entries.get(self.key, msgspec.json.Decoder(dict[str, OperatorCost]).decode) or {}
            _latest.clear()  # only one file at a time
            _latest[path] = known
        self._stamp, self._kept = known
        self.costs |= self._kept | self._unsaved


_latest: dict[Path, tuple[Stamp, dict[str, OperatorCost]]] = {}
"""The file last read or written, kept because every program reads the same file."""


def _readable(text: str) -> str:
    return "".join(character if character.isalnum() or character in ".+" else "-" for character in text)[:60].lower()
