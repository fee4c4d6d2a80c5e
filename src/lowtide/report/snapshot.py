"""A report as a ``torch.cuda.memory`` snapshot of the predicted step, for pytorch.org/memory_viz; made without torch.

Every tensor and workspace is an allocation in one segment, placed first-fit. Its frames are the operator at the user's
line, then the modules around it, the innermost first. The segment may be larger than the peak, by what first-fit cannot fill.
"""

from __future__ import annotations

import bisect
import pickle
from typing import Any

from lowtide.ir import Kind
from lowtide.report.profile import MemoryBlock, StepProfile
from lowtide.report.report import Report

_ORIGIN = 0x7F0000000000  # where the segment begins; memory_viz shows addresses in hexadecimal


def memory_snapshot(report: Report) -> bytes:
    """The pickled snapshot: plain dictionaries, lists, strings and integers."""
    return pickle.dumps(snapshot_of(report.run), protocol=4)


def snapshot_of(step: StepProfile) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return at the end of the step."""
    space = _Space()
    held: dict[int, tuple[int, MemoryBlock]] = {}  # position -> (address, block)
    events: list[dict[str, Any]] = []
    coming, going = _by_span(step)
    for index, span in enumerate(step.spans):
        for position in coming[index]:
            block = step.blocks[position]
            held[position] = space.allocate(block.bytes), block
            events.append(_event("alloc", *held[position], span.start_ns))
        for position in going[index]:
            address, block = held.pop(position)
            space.release(address, block.bytes)
            events += [_event(action, address, block, span.end_ns) for action in ("free_requested", "free_completed")]
    start = {"action": "segment_alloc", "addr": _ORIGIN, "size": space.size, "stream": 0, "frames": [], "time_us": 0}
    left = sorted(held.values(), key=lambda pair: pair[0])
    return {
        "segments": [_segment(left, space.size)] if space.size else [],
        "device_traces": [[start, *events] if space.size else []],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _by_span(step: StepProfile) -> tuple[list[list[int]], list[list[int]]]:
    """Per span, the blocks that it allocates, and those that are released after it, what is there briefly first."""
    coming: list[list[int]] = [[] for _ in step.spans]
    going: list[list[int]] = [[] for _ in step.spans]
    for position, block in enumerate(step.blocks):
        if block.bytes and block.first < len(step.spans):
            coming[block.first].append(position)
            if block.last < len(step.spans):
                going[block.last].append(position)
    for index, released in enumerate(going):
        released.sort(key=lambda position: step.blocks[position].first != index)
    return coming, going


def _event(action: str, address: int, block: MemoryBlock, at_ns: int) -> dict[str, Any]:
    about = {"action": action, "addr": address, "size": block.bytes, "stream": 0, "time_us": at_ns // 1000}
    return about | {"frames": _frames(block)}


def _frames(block: MemoryBlock) -> list[dict[str, Any]]:
    """Innermost first."""
    span = block.span
    if span is None:
        return [_frame(f"{block.kind.value}: {block.detail}", "lowtide", 0)]
    filename, _, line = span.source.rpartition(":")
    name = span.name + (", recomputed" if span.again else "")
    name += "" if block.kind is Kind.TENSOR else f", {block.kind.value}"
    name += f" ({block.detail})" if block.detail else ""
    frames = [_frame(name, filename, int(line)) if filename and line.isdigit() else _frame(name, span.target, 0)]
    path = span.module
    while path:
        frames.append(_frame(path, "module", 0))
        path = path.rpartition(".")[0]
    frames.append(_frame("forward" if span.forward else "backward", "pass", 0))
    return frames


def _frame(name: str, filename: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _segment(held: list[tuple[int, MemoryBlock]], size: int) -> dict[str, Any]:
    """``held``: addresses and blocks in the order of the addresses."""
    allocated = sum(block.bytes for _, block in held)
    blocks, at = [], _ORIGIN
    for address, block in held:
        if address > at:
            blocks.append(_block(at, address - at))
        blocks.append(_block(address, block.bytes, block))
        at = address + block.bytes
    if at < _ORIGIN + size:
        blocks.append(_block(at, _ORIGIN + size - at))
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
        "blocks": blocks,
    }


def _block(address: int, size: int, block: MemoryBlock | None = None) -> dict[str, Any]:
    """A part of the segment; without ``block`` a gap."""
    state = "inactive" if block is None else "active_allocated"
    requested, frames = (0, []) if block is None else (size, _frames(block))
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


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
