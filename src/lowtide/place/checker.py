"""Check a placement with a sweep over time, independently of the code that makes placements."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from lowtide.place.buffers import Buffers, Numbers


def fault(buffers: Buffers, offsets: Numbers, names: Sequence[object] | None = None) -> str | None:
    """Describe the first error in ``offsets`` (one per buffer, in bytes): an offset below 0 or not a multiple of the alignment,
    or two buffers that share a byte while both are live. ``None`` if there is none. Buffers are called by ``names``, else by
    number. Takes n log n steps and the insertions into a sorted list of live buffers."""
    called = names if names is not None else range(len(buffers))
    if len(offsets) != len(buffers):
        return f"there are {len(offsets)} offsets for {len(buffers)} buffers"
    starts, sizes = offsets.tolist(), buffers.size.tolist()
    for i, offset in enumerate(starts):
        if offset < 0 or offset % buffers.alignment:
            return f"buffer {called[i]} is at offset {offset}, which is no multiple of {buffers.alignment} from 0 on"
    # Of events at one time, ends come before starts.
    events = [(time, 1, i) for i, time in enumerate(buffers.lower.tolist())]
    events += [(time, 0, i) for i, time in enumerate(buffers.upper.tolist())]
    live: list[tuple[int, int]] = []  # (offset, buffer), by offset
    for time, comes, i in sorted(event for event in events if sizes[event[2]]):
        entry = (starts[i], i)
        place = bisect.bisect_left(live, entry)
        if not comes:
            del live[place]
            continue
        for _, other in live[max(place - 1, 0) : place + 1]:
            if starts[i] < starts[other] + sizes[other] and starts[other] < starts[i] + sizes[i]:
                ranges = " and ".join(f"{starts[j]} to {starts[j] + sizes[j]}" for j in (other, i))
                return f"buffers {called[other]} and {called[i]} are both live at {time} and overlap: bytes {ranges}"
        live.insert(place, entry)
    return None
