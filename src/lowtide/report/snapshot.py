"""A report as a ``torch.cuda.memory`` snapshot of the predicted step, for pytorch.org/memory_viz. Made without torch.

Every tensor and workspace is an allocation in one segment, placed first-fit. Its frames are the operator at the user's
line, then the modules around it, innermost first. First-fit may leave gaps, so the segment may be larger than the peak.
"""

from __future__ import annotations

import bisect
import pickle
from collections.abc import Iterator
from typing import Any

from lowtide.ir import Kind
from lowtide.report.profile import MemoryBlock, StepProfile
from lowtide.report.report import Report

_ORIGIN = 0x7F0000000000  # address of the segment; memory_viz shows it in hexadecimal


def memory_snapshot(report: Report) -> bytes:
    """The pickled snapshot: plain dictionaries, lists, strings and integers."""
    return pickle.dumps(snapshot_of(report.run), protocol=4)


def snapshot_of(step: StepProfile) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` would return at the end of the step."""
    held: list[tuple[int, int, int]] = []  # (address, end, position of the block), by address
    events: list[dict[str, Any]] = []
    size = 0
    for index, change, position in sorted(_changes(step)):
        block, span = step.blocks[position], step.spans[index]
        if change == 0:
            address = _first_fit(held, block.bytes)
            size = max(size, address + block.bytes - _ORIGIN)
            bisect.insort(held, (address, address + block.bytes, position))
            events.append(_event("alloc", address, block, span.start_ns))
        else:
            released = next(each for each in held if each[2] == position)
            held.remove(released)
            for action in ("free_requested", "free_completed"):
                events.append(_event(action, released[0], block, span.end_ns))
    start = {"action": "segment_alloc", "addr": _ORIGIN, "size": size, "stream": 0, "frames": [], "time_us": 0}
    left = [(address, step.blocks[position]) for address, _, position in held]
    return {
        "segments": [_segment(left, size)] if size else [],
        "device_traces": [[start, *events] if size else []],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _changes(step: StepProfile) -> Iterator[tuple[int, int, int]]:
    """(span, change, position of the block). The change is 0 for an allocation, 1 for the release of a block that lasts
    one span, 2 for any other release."""
    for position, block in enumerate(step.blocks):
        if block.bytes and block.first < len(step.spans):
            yield block.first, 0, position
            if block.last < len(step.spans):
                yield block.last, 1 if block.first == block.last else 2, position


def _first_fit(held: list[tuple[int, int, int]], size: int) -> int:
    """The first address with ``size`` free bytes."""
    free = _ORIGIN
    for address, end, _ in held:
        if address - free >= size:
            break
        free = end
    return free


def _event(action: str, address: int, block: MemoryBlock, at_ns: int) -> dict[str, Any]:
    about = {"action": action, "addr": address, "size": block.bytes, "stream": 0, "time_us": at_ns // 1000}
    return about | {"frames": _frames(block)}


def _frames(block: MemoryBlock) -> list[dict[str, Any]]:
    """Innermost first."""
    span = block.span
    if span is None:
        return [_frame(f"{block.kind.value}: {block.detail}", "lowtide")]
    filename, _, line = span.source.rpartition(":")
    name = span.name + (", recomputed" if span.again else "")
    name += "" if block.kind is Kind.TENSOR else f", {block.kind.value}"
    name += f" ({block.detail})" if block.detail else ""
    frames = [_frame(name, filename, int(line)) if filename and line.isdigit() else _frame(name, span.target)]
    path = span.module
    while path:
        frames.append(_frame(path, "module"))
        path = path.rpartition(".")[0]
    return [*frames, _frame("forward" if span.forward else "backward", "pass")]


def _frame(name: str, filename: str, line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def _segment(held: list[tuple[int, MemoryBlock]], size: int) -> dict[str, Any]:
    """``held``: addresses and blocks in order of address."""
    allocated = sum(block.bytes for _, block in held)
    blocks, free = [], _ORIGIN
    for address, block in [*held, (_ORIGIN + size, None)]:
        if address > free:
            blocks.append(_block(free, address - free))
        if block is not None:
            blocks.append(_block(address, block.bytes, block))
            free = address + block.bytes
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
    """A part of the segment; a gap without ``block``."""
    state = "inactive" if block is None else "active_allocated"
    requested, frames = (0, []) if block is None else (size, _frames(block))
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
