"""What goes wrong where memory is short."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """An allocation that could not be granted: what was asked for, what was in use, and by how much both are too much."""

    wanted_bytes: int
    used_bytes: int
    missing_bytes: int


class RebuildError(RuntimeError):
    """What was evicted can not be rebuilt within the budget; no plan was found that would do with less than that."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"no plan was found for a rebuild without {missing_bytes} bytes more")
        self.missing_bytes = missing_bytes
