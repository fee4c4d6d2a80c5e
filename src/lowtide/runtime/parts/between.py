"""Measure the memory that code between the programs of a step holds; no plan counts it."""

from __future__ import annotations

import torch

from lowtide.memory.allocators import PeakWindow, allocated_bytes, meter_of


class HeldBetween:
    """``bytes``: memory held by no program when the latest forward pass began, above the level at the start of the
    step."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.bytes = 0
        self._level_bytes: int | None = None  # level after the latest forward pass, or at the start of the step
        self._start_bytes = 0  # level at the start of the step, without earlier steps' waiting passes
        self._window: PeakWindow | None = None

    def begin_step(self, waiting_bytes: int) -> None:
        """A step begins. Passes of earlier steps still hold ``waiting_bytes``."""
        self.bytes = 0
        self._level_bytes = allocated_bytes(self.device)
        self._start_bytes = (self._level_bytes or 0) - waiting_bytes

    def count(self) -> None:
        """Count what was allocated since the latest forward pass as held by code between programs."""
        level = allocated_bytes(self.device)
        if level is not None and self._level_bytes is not None:
            self.bytes += level - self._level_bytes
        self._level_bytes = level

    def count_all(self, saved_bytes: int) -> None:
        """Count all that was allocated in the step, except ``saved_bytes``, as held by code between: some passes have
        ended since."""
        self.bytes = self.beside(saved_bytes) or 0
        self._level_bytes = allocated_bytes(self.device)

    def beside(self, saved_bytes: int) -> int | None:
        """Bytes held now beside programs that hold ``saved_bytes``; ``None`` if nothing counts allocations."""
        level = allocated_bytes(self.device)
        return None if level is None or self._level_bytes is None else level - self._start_bytes - saved_bytes

    def now(self) -> int | None:
        """``bytes``, plus all that was allocated since the latest forward pass; ``None`` if nothing counts
        allocations."""
        level = allocated_bytes(self.device)
        return None if level is None or self._level_bytes is None else max(self.bytes, 0) + level - self._level_bytes

    def set_aside(self, kept_bytes: int) -> None:
        """Planning keeps ``kept_bytes`` (constants, workspaces of libraries): do not count these as held by code
        between programs."""
        self._start_bytes += kept_bytes
        self._level_bytes = None if self._level_bytes is None else self._level_bytes + kept_bytes

    def go_on(self) -> None:
        self._level_bytes = allocated_bytes(self.device)
        self.watch()

    def watch(self) -> None:
        """Measure the peak of allocated bytes from now on."""
        self.watched()
        meter = meter_of(self.device)
        self._window = None if meter is None else PeakWindow(meter)

    def watched(self) -> int | None:
        """The peak since ``watch``, above the level at the start of the step."""
        window, self._window = self._window, None
        if window is None:
            return None
        peak_bytes = window.start_bytes + window.peak_bytes
        window.close()
        return peak_bytes - self._start_bytes
