"""How much memory code between the programs of a step holds: what no plan counts is measured."""

from __future__ import annotations

import torch

from lowtide.memory.allocators import PeakWindow, allocated_bytes, meter_of


class HeldBetween:
    """``bytes`` were held by no program when the latest forward pass began, above what was allocated when the step did."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.bytes = 0
        self._level_bytes: int | None = None  # when the latest forward pass had ended, or the step began
        self._start_bytes = 0  # level when the step began, but for what waited from earlier ones
        self._window: PeakWindow | None = None

    def begin_step(self, waiting_bytes: int) -> None:
        """Passes of earlier steps still hold ``waiting_bytes``."""
        self.bytes = 0
        self._level_bytes = allocated_bytes(self.device)
        self._start_bytes = (self._level_bytes or 0) - waiting_bytes

    def count(self) -> None:
        """What was allocated since the latest forward pass ended is held by code between programs."""
        level = allocated_bytes(self.device)
        if level is not None and self._level_bytes is not None:
            self.bytes += level - self._level_bytes
        self._level_bytes = level

    def count_all(self, saved_bytes: int) -> None:
        """So is all that was allocated in the step, but for ``saved_bytes``: passes have ended since."""
        self.bytes = self.beside(saved_bytes) or 0
        self._level_bytes = allocated_bytes(self.device)

    def beside(self, saved_bytes: int) -> int | None:
        """Bytes that are held now by nobody, where programs hold ``saved_bytes``; ``None`` where nothing counts them."""
        level = allocated_bytes(self.device)
        return None if level is None or self._level_bytes is None else level - self._start_bytes - saved_bytes

    def now(self) -> int | None:
        """``bytes``, and what was allocated since the latest forward pass ended, whoever holds it."""
        level = allocated_bytes(self.device)
        return None if level is None or self._level_bytes is None else max(self.bytes, 0) + level - self._level_bytes

    def set_aside(self, kept_bytes: int) -> None:
        """Planning keeps so much (constants, workspaces of libraries), which is no memory of code between programs."""
        self._start_bytes += kept_bytes
        self._level_bytes = None if self._level_bytes is None else self._level_bytes + kept_bytes

    def go_on(self) -> None:
        self._level_bytes = allocated_bytes(self.device)
        self.watch()

    def watch(self) -> None:
        """Until ``watched``, the most that is allocated is noted."""
        self.watched()
        meter = meter_of(self.device)
        self._window = None if meter is None else PeakWindow(meter)

    def watched(self) -> int | None:
        """The most that was allocated since ``watch``, above what was when the step began."""
        window, self._window = self._window, None
        if window is None:
            return None
        peak_bytes = window.start_bytes + window.peak_bytes
        window.close()
        return peak_bytes - self._start_bytes
