"""The limit on what a device's allocator hands out."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from lowtide.memory.allocators import Meter


@dataclass(frozen=True, slots=True)
class Refusal:
    """An allocation that could not be granted: what was asked for, what was in use, and by how much both are too much."""

    wanted_bytes: int
    used_bytes: int
    missing_bytes: int


class Limit:
    """``limit_bytes`` on the level of an allocator, ``None`` for no limit; and the last allocation that it refused.

    ``interruption``: what was raised while room was made for an allocation, where C++ cannot carry it.
    """

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.limit_bytes: int | None = None
        self.refusal: Refusal | None = None
        self.interruption: BaseException | None = None

    def free_bytes(self) -> int:
        """How far the level is below the limit."""
        return sys.maxsize if self.limit_bytes is None else self.limit_bytes - self.meter.level_bytes

    def refuse(self, wanted_bytes: int) -> None:
        """There is no room for so many bytes."""
        self.refusal = Refusal(wanted_bytes, self.meter.level_bytes, wanted_bytes - self.free_bytes())

    def take_failure(self) -> tuple[BaseException | None, Refusal | None]:
        """What happened since the last call where room was to be made, if anything."""
        failure = self.interruption, self.refusal
        self.interruption = self.refusal = None
        return failure

    def take_missing_bytes(self) -> int:
        """By how much the last allocation that was refused exceeded the limit, 0 without one; raises what interrupted it."""
        interruption, refusal = self.take_failure()
        if interruption is not None:
            raise interruption from None
        return 0 if refusal is None else refusal.missing_bytes
