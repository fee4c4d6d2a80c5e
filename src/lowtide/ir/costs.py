"""What a graph costs on a device: integer columns beside the graph, one entry per op or per storage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.ir.second_memory import SecondMemory

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """``time_ns[op]``, ``workspace_bytes[op]`` (allocated and released inside the op) and ``storage_bytes[storage]``.
    External storages have 0 bytes. ``rng_state_bytes`` is what one saved generator state occupies on the device.
    ``device`` names where the numbers come from. Where there is a ``second_memory``, schedules may move
    storages there and back. ``collectives_beside``: collectives run beside computing, on a stream of their own. The columns are
    read-only."""

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
        """Time of all operators, each once: of the program without recomputation, where nothing runs beside computing."""
        return int(self.time_ns.sum())
