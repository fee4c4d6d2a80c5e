"""What a step was measured to take, as a file: ``lowtide-measurement/1``, which ``lowtide.Measurement.save`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lowtide.errors import PlanError
from lowtide.ir.serial import read_json

MEASUREMENT_FORMAT = "lowtide-measurement/1"


class Measured(Protocol):
    """What is told of a measurement, see ``lowtide.Measurement``."""

    @property
    def peak_bytes(self) -> int: ...
    @property
    def time_ns(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def timeline(self) -> Sequence[tuple[int, int]]: ...
    @property
    def final_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SavedMeasurement:
    """A measurement as it was saved; the fields are those of ``lowtide.Measurement``."""

    peak_bytes: int
    time_ns: int
    device: str
    timeline: tuple[tuple[int, int], ...]
    final_bytes: int


def measurement_to_json(measured: Measured) -> dict[str, Any]:
    return {
        "format": MEASUREMENT_FORMAT,
        "peak_bytes": measured.peak_bytes,
        "time_ns": measured.time_ns,
        "device": measured.device,
        "final_bytes": measured.final_bytes,
        "timeline": [list(level) for level in measured.timeline],
    }


def load_measurement(path: str | Path) -> SavedMeasurement:
    """Raises ``PlanError`` for a file that is not a measurement."""
    data = read_json(path)
    if data.get("format") != MEASUREMENT_FORMAT:
        raise PlanError(f"{path} is not a measurement: expected {MEASUREMENT_FORMAT!r}, found {data.get('format')!r}.")
    try:
        timeline = tuple((int(at), int(level)) for at, level in data["timeline"])
        peak, time_ns, final = (int(data[key]) for key in ("peak_bytes", "time_ns", "final_bytes"))
        return SavedMeasurement(peak, time_ns, str(data["device"]), timeline, final)
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is not a complete measurement: {type(error).__name__} {error}.") from error
