"""Where every tensor of a step lies: address against time, one rectangle each, by the addresses in an arena.

Some memory has no address in the arena: what is resident throughout, and what outlives the step and belongs to the
caller. It is stacked above the arena.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.ir import Kind
from lowtide.place import Layout
from lowtide.report.profile import FETCH, MemoryBlock, StepProfile


class Content(enum.Enum):
    """The content of a rectangle."""

    KEPT = "kept for backward"
    PASSING = "forward only"
    RECOMPUTED = "recomputed"
    FETCHED = "fetched"
    BACKWARD = "backward only"
    GRADIENT = "gradients that stay"
    OTHER = "workspaces, other"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """``block`` at ``offset`` while the spans from ``first`` to ``last`` run. ``last`` is the number of spans if it
    stays."""

    block: MemoryBlock
    content: Content
    offset: int
    first: int
    last: int

    @property
    def end(self) -> int:
        """The first byte above it."""
        return self.offset + self.block.bytes


@dataclass(frozen=True, slots=True)
class MemoryMap:
    """``reserved_bytes``: of everything. The arena lies below ``block_bytes``, everything else above."""

    rectangles: tuple[Rectangle, ...]
    reserved_bytes: int
    block_bytes: int


def shown_contents(run: StepProfile) -> list[Content]:
    """The contents in the legend. Fetched storages are only included if there are any."""
    return [content for content in Content if content is not Content.FETCHED or run.transfers]


def memory_map(run: StepProfile, layout: Layout) -> MemoryMap:
    placed = [(block, offset) for block, offset in zip(run.blocks, layout.offsets, strict=True) if block.bytes]
    inside = [(b, offset, b.first, b.last) for b, offset in placed if offset is not None and b.first <= b.last]
    pieces = _stacked([block for block, offset in placed if offset is None], layout.block_bytes)
    rectangles = tuple(Rectangle(block, _content(block, run), *where) for block, *where in (*inside, *pieces))
    return MemoryMap(rectangles, layout.reserved_bytes, layout.block_bytes)


def _content(block: MemoryBlock, run: StepProfile) -> Content:
    if block.kind is not Kind.TENSOR or block.span is None:
        return Content.OTHER
    if block.span.again:
        return Content.RECOMPUTED
    if block.span.target == FETCH:
        return Content.FETCHED
    if block.span.forward:
        return Content.KEPT if block.last >= run.boundary else Content.PASSING
    return Content.GRADIENT if block.last == len(run.spans) else Content.BACKWARD


def _stacked(blocks: Sequence[MemoryBlock], floor: int) -> Iterator[tuple[MemoryBlock, int, int, int]]:
    """Block, offset, first and last span. Blocks are stacked from ``floor`` on, in order, and move down when one below
    ends."""
    times = sorted({time for block in blocks for time in (block.first, block.last + 1)})
    since: dict[int, tuple[int, int]] = {}  # block -> its offset, and since when
    for time in times:
        live = [i for i, block in enumerate(blocks) if block.first <= time <= block.last]
        offset, now = floor, dict[int, int]()
        for i in live:
            now[i] = offset
            offset += blocks[i].bytes
        for i, (before, first) in list(since.items()):
            if now.get(i) != before:
                yield blocks[i], before, first, time - 1
                del since[i]
        for i, at in now.items():
            since.setdefault(i, (at, time))
