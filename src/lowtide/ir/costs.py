"""Costs of a graph on a device: integer columns with one entry per op or per storage, and the device's second memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.errors import PlanError

Column = npt.NDArray[np.int64]
_NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SecondMemory:
    """The memory that storages are offloaded to: host memory behind a link, or a file on a disk.

    ``offload_bytes_per_second`` and ``fetch_bytes_per_second`` are the bandwidths of the two directions, measured while
    operators run; ``latency_ns`` passes before the first byte of a transfer. Transfers in one direction run one after another.
    ``shared``: so do transfers in opposite directions, as on a disk. ``capacity_bytes``: its size, ``None`` without a limit.
    ``name``: the memory that the numbers stand for (``"cpu"``, ``"disk:/folder"``), empty where they are only assumed.

    Raises ``PlanError`` for a bandwidth below 1 byte per second, and for a latency or a capacity below 0.
    """

    offload_bytes_per_second: int
    fetch_bytes_per_second: int
    latency_ns: int = 0
    capacity_bytes: int | None = None
    shared: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if min(self.offload_bytes_per_second, self.fetch_bytes_per_second) < 1:
            raise PlanError("a second memory moves at least 1 byte per second in both directions.")
        if self.latency_ns < 0 or (self.capacity_bytes or 0) < 0:
            raise PlanError("the latency and the capacity of a second memory are not below 0.")

    def held(self, sizes: Iterable[tuple[int, int]]) -> list[int]:
        """Go through pairs of storage and bytes in order and return the storages that fit beside those already taken."""
        room, found = self.capacity_bytes, list[int]()
        for storage, size in sizes:
            if room is None or size <= room:
                found.append(storage)
                room = None if room is None else room - size
        return found

    def offload_ns(self, size: int) -> int:
        """Time to offload ``size`` bytes."""
        return self.latency_ns - (-size * _NS_PER_SECOND // self.offload_bytes_per_second)

    def fetch_ns(self, size: int) -> int:
        """Time to fetch ``size`` bytes."""
        return self.latency_ns - (-size * _NS_PER_SECOND // self.fetch_bytes_per_second)


def check_second_memory(name: object) -> None:
    """Raise ``PlanError`` unless ``name`` is that of a second memory: ``"cpu"``, ``"disk"`` or ``"disk:/folder"``."""
    if not isinstance(name, str) or not (name in ("cpu", "disk") or (name.startswith("disk:") and name != "disk:")):
        raise PlanError(
            f'offload={name!r} is unknown; use "cpu" (the host\'s memory, for an accelerator), "disk" or "disk:/folder".'
        )


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Cost columns of a graph: ``time_ns[op]``, ``workspace_bytes[op]`` (allocated and released inside the op) and
    ``storage_bytes[storage]``, 0 for external storages. The columns are read-only. ``rng_state_bytes``: device memory of one
    saved generator state. ``device``: the device that the numbers come from. ``second_memory``: if given, schedules may
    offload storages to it and fetch them. ``collectives_beside``: collectives overlap with computation, on a stream of
    their own."""

    time_ns: Column
    workspace_bytes: Column
    storage_bytes: Column
    rng_state_bytes: int = 0
    device: str = ""
    second_memory: SecondMemory | None = None
    collectives_beside: bool = False

    def __post_init__(self) -> None:
        for name in ("time_ns", "workspace_bytes", "storage_bytes"):
            column = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @property
    def total_time_ns(self) -> int:
        """Sum of all operators' times: the time of the program without recomputation if nothing overlaps with computation."""
        return int(self.time_ns.sum())
