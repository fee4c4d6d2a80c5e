"""A report as a ``torch.cuda.memory`` snapshot of the predicted step, for pytorch.org/memory_viz; made without torch.

Every tensor and workspace is an allocation in one segment, placed first-fit. Its frames are the operator at the user's
line, then the modules around it, the innermost first. The segment may be larger than the peak, by what first-fit cannot fill.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterator
from typing import Any

from lowtide.report.report import Report
from lowtide.report.run import Block, Run, Span

_ORIGIN = 0x7F0000000000  # where the segment begins; memory_viz shows addresses in hexadecimal


def memory_snapshot(report: Report) -> bytes:
    """The pickled snapshot: plain dictionaries, lists, strings and integers."""
    return pickle.dumps(snapshot_of(report.run), protocol=4)


def snapshot_of(run: Run) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return at the end of the run."""
    space = _Space()
    addresses: dict[int, int] = {}
    events: list[dict[str, Any]] = []
    coming, going = _by_span(run)
    for index, span in enumerate(run.spans):
        for position in coming[index]:
            block = run.blocks[position]
            addresses[position] = space.allocate(block.bytes)
            events.append(_event("alloc", block, addresses[position], run, span.start_ns))
        for position in going[index]:
            block, address = run.blocks[position], addresses.pop(position)
            space.release(address, block.bytes)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, block, address, run, span.end_ns))
    segment = _segment(run, space.size, addresses)
    start = {"action": "segment_alloc", "addr": _ORIGIN, "size": space.size, "stream": 0, "frames": [], "time_us": 0}
    return {
        "segments": [segment] if space.size else [],
        "device_traces": [[start, *events] if space.size else []],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _by_span(run: Run) -> tuple[list[list[int]], list[list[int]]]:
    """Per span, the blocks that it allocates, and those that are released after it, what is there briefly first."""
    coming: list[list[int]] = [[] for _ in run.spans]
    going: list[list[int]] = [[] for _ in run.spans]
    for position, block in enumerate(run.blocks):
        if block.bytes and block.first < len(run.spans):
            coming[block.first].append(position)
            if block.last < len(run.spans):
                going[block.last].append(position)
    for index, released in enumerate(going):
        released.sort(key=lambda position: run.blocks[position].first != index)
    return coming, going


def _event(action: str, block: Block, address: int, run: Run, at_ns: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": block.bytes,
        "stream": 0,
        "time_us": at_ns // 1000,
        "frames": _frames(block, run),
    }


def _frames(block: Block, run: Run) -> list[dict[str, Any]]:
    """Innermost first."""
    if block.owner is None:
        return [_frame(f"{block.kind}: {block.detail}", "lowtide", 0)]
    span = run.spans[block.owner]
    filename, _, line = span.source.rpartition(":")
    name = _label(block, span)
    frames = [_frame(name, filename, int(line)) if filename and line.isdigit() else _frame(name, span.target, 0)]
    path = span.module
    while path:
        frames.append(_frame(path, "module", 0))
        path = path.rpartition(".")[0]
    frames.append(_frame("forward" if span.forward else "backward", "pass", 0))
    return frames


def _label(block: Block, span: Span) -> str:
    again = ", recomputed" if span.again else ""
    kind = "" if block.kind == "tensor" else f", {block.kind}"
    return f"{span.name}{again}{kind}" + (f" ({block.detail})" if block.detail else "")


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _segment(run: Run, size: int, addresses: dict[int, int]) -> dict[str, Any]:
    held = sorted((address, run.blocks[position]) for position, address in addresses.items())
    allocated = sum(block.bytes for _, block in held)
    return {
        "device": 0,
        "address": _ORIGIN,
        "total_size": size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": allocated,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": list(_blocks(run, held, size)),
    }


def _blocks(run: Run, held: list[tuple[int, Block]], size: int) -> Iterator[dict[str, Any]]:
    """The segment from its beginning to its end."""
    at = _ORIGIN
    for address, block in held:
        if address > at:
            yield _inactive(at, address - at)
        yield {
            "address": address,
            "size": block.bytes,
            "requested_size": block.bytes,
            "state": "active_allocated",
            "frames": _frames(block, run),
        }
        at = address + block.bytes
    if at < _ORIGIN + size:
        yield _inactive(at, _ORIGIN + size - at)


def _inactive(address: int, size: int) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}


class _Space:
    """Addresses, given out first-fit from a list of gaps in their order; ``size`` is how far it ever reached."""

    def __init__(self) -> None:
        self.size = 0
        self.gaps: list[tuple[int, int]] = []  # (address, bytes)

    def allocate(self, size: int) -> int:
        for index, (address, room) in enumerate(self.gaps):
            if room >= size:
                self.gaps[index : index + 1] = [(address + size, room - size)] if room > size else []
                return address
        end = _ORIGIN + self.size
        if self.gaps and sum(self.gaps[-1]) == end:
            address, room = self.gaps.pop()
            self.size += size - room
            return address
        self.size += size
        return end

    def release(self, address: int, size: int) -> None:
        """Joined with the gaps beside it."""
        index = bisect.bisect(self.gaps, (address, size))
        if index < len(self.gaps) and self.gaps[index][0] == address + size:
            size += self.gaps.pop(index)[1]
        if index and sum(self.gaps[index - 1]) == address:
            before, room = self.gaps.pop(index - 1)
            address, size = before, room + size
            index -= 1
        self.gaps.insert(index, (address, size))
