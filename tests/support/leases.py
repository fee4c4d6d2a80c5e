"""Room of second memories that comes back in the middle of a lease."""

from __future__ import annotations

import threading
from typing import Any


def let_go_inside_a_lease(memory: Any, leases: list[Any]) -> None:
    """Drop the ``leases`` where the memory's lock is held, as the garbage collector may; fails where that waits for ever."""

    def collect() -> None:
        with memory._lock:
            leases.clear()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
