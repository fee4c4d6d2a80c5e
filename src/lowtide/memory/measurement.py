"""The result of a memory measurement, and its file format ``lowtide-measurement/1``. Does not import torch, as reports
must not."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lowtide.errors import PlanError
from lowtide.ir.serial import read_json
from lowtide.notebook import Shown
from lowtide.store import write_atomically
from lowtide.units import format_bytes, format_time

MEASUREMENT_FORMAT = "lowtide-measurement/1"


@dataclass(frozen=True, slots=True)
class Measurement(Shown):
    """What one call took.

    ``peak_bytes``: the most that the allocator had handed out, above the level at the start. ``reserved_bytes``: the
    most that it held of the device, handed out or not, above the same level (on the CPU, arenas make the difference).
    ``final_bytes``: the level at the end, with the result alive. ``device``: where the bytes are. ``time_ns``: wall
    clock. ``timeline``: (ns since start, bytes above start) at every change; empty on CUDA; it stops after a million
    changes, but the peak does not.
    """

    peak_bytes: int
    time_ns: int
    device: str
    timeline: tuple[tuple[int, int], ...] = field(repr=False)
    final_bytes: int
    reserved_bytes: int | None = None

    def __str__(self) -> str:
        return f"{self._heading()}: {', '.join(f'{name} {value}' for name, value in self._facts().items())}"

    def _heading(self) -> str:
        return f"measured on {self.device}"

    def _facts(self) -> dict[str, str]:
        held = {} if self.reserved_bytes is None else {"reserved": format_bytes(self.reserved_bytes)}
        ends = {"at the end": format_bytes(self.final_bytes), "time": format_time(self.time_ns)}
        return {"peak": format_bytes(self.peak_bytes), **held, **ends}

    def save(self, path: str | Path) -> None:
        """Write ``lowtide-measurement/1`` JSON, for ``lowtide report --measurement``. Raises ``PlanError``."""
        data = {"format": MEASUREMENT_FORMAT, **msgspec.to_builtins(self)}
        write_atomically(Path(path), json.dumps(data) + "\n")


def load_measurement(path: str | Path) -> Measurement:
    """Read a measurement from a file. Raises ``PlanError`` if the file is not one."""
    data = read_json(path)
    if data.get("format") != MEASUREMENT_FORMAT:
        raise PlanError(f"{path} is not a measurement: expected {MEASUREMENT_FORMAT!r}, found {data.get('format')!r}.")
    try:
        return msgspec.convert(data, Measurement)
    except msgspec.ValidationError as error:
        raise PlanError(f"{path} is not a complete measurement: {error}.") from error
