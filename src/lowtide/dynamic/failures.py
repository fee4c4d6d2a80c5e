"""Failures for lack of memory: refused allocations and impossible rebuilds."""

from __future__ import annotations

from typing import NamedTuple


class Refusal(NamedTuple):
    """A refused allocation: bytes requested, bytes in use, and by how many bytes their sum exceeds the limit."""

    wanted_bytes: int
    used_bytes: int
    missing_bytes: int


class RebuildError(RuntimeError):
    """No plan was found that rebuilds evicted storages within the budget; the best needs ``missing_bytes`` more."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"no plan was found for a rebuild without {missing_bytes} bytes more")
        self.missing_bytes = missing_bytes
