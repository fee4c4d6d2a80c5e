"""One thread and costs of the session's own, shared with the processes that tests start."""

from __future__ import annotations

from tests.support.fixtures import one_thread, own_cache

__all__ = ["one_thread", "own_cache"]
