"""What one call was measured to take, and its file ``lowtide-measurement/1``. Without torch, so that reports can be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import PlanError
from lowtide.ir.serial import read_json
from lowtide.store import write_atomically

MEASUREMENT_FORMAT = "lowtide-measurement/1"


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one call took.

    ``peak_bytes``: the most that the allocator had handed out during the call above the level at its start.
    ``final_bytes``: the level at its end, the result still alive, relative to the start. ``time_ns``: wall clock.
    ``device``: the device that the bytes are of. ``timeline``: (ns since start, bytes above start) at every change;
    empty on CUDA; it stops after a million changes, the peak does not.
    """

    peak_bytes: int
    time_ns: int
    device: str
    timeline: tuple[tuple[int, int], ...]
    final_bytes: int = 0

    def save(self, path: str | Path) -> None:
        """Write ``lowtide-measurement/1`` JSON, for ``lowtide report --measurement``. Raises ``PlanError``."""
        data = {
            "format": MEASUREMENT_FORMAT,
            "peak_bytes": self.peak_bytes,
            "time_ns": self.time_ns,
            "device": self.device,
            "final_bytes": self.final_bytes,
            "timeline": [list(level) for level in self.timeline],
        }
        write_atomically(Path(path), json.dumps(data) + "\n")


def load_measurement(path: str | Path) -> Measurement:
    """Raises ``PlanError`` for a file that is not a measurement."""
    data = read_json(path)
    if data.get("format") != MEASUREMENT_FORMAT:
        raise PlanError(f"{path} is not a measurement: expected {MEASUREMENT_FORMAT!r}, found {data.get('format')!r}.")
    try:
        timeline = tuple((int(at), int(level)) for at, level in data["timeline"])
        peak, time_ns, final = (int(data[key]) for key in ("peak_bytes", "time_ns", "final_bytes"))
        return Measurement(peak, time_ns, str(data["device"]), timeline, final)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is not a complete measurement: {type(error).__name__} {error}.") from error
