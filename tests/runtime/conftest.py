"""One thread and a cost cache of the session's own: the same sums in the same order, nothing written elsewhere."""

from __future__ import annotations

from tests.support.fixtures import one_thread, own_cache

__all__ = ["one_thread", "own_cache"]
