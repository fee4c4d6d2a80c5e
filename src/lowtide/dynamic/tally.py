"""What a live run has done so far, and the clock that it is timed by."""

from __future__ import annotations

import time

now_ns = time.perf_counter_ns


class Tally:
    """What has happened so far: counts, and nanoseconds of wall time."""

    def __init__(self) -> None:
        self.operators = 0
        self.operator_ns = 0
        self.evictions = 0
        self.evicted_bytes = 0
        self.evict_ns = 0
        self.rematerializations = 0
        self.rematerialize_ns = 0
        self.copies = 0

    def copy(self) -> Tally:
        copy = Tally()
        copy.__dict__.update(self.__dict__)
        return copy
