"""Buffers to place: random ones, ones that fill a rectangle, and what the least is that some take up."""

from __future__ import annotations

import itertools
import random

from lowtide.place import Buffers

Row = tuple[int, int, int]


def random_rows(seed: int, count: int, *, times: int = 8, most: int = 9) -> list[Row]:
    """Rows of lower, upper, size; some sizes are 0."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        lower, upper = sorted(draw.sample(range(times + 1), 2))
        rows.append((lower, upper, draw.randint(0, most) if draw.random() < 0.9 else 0))
    return rows


def filled_rectangle(seed: int, count: int, *, times: int = 1000, height: int = 4096, gap: float = 0.0) -> list[Row]:
    """``count`` buffers that a capacity of ``height`` holds: a rectangle of time and bytes, cut again and again. Every section
    is full to the byte; with ``gap`` that part of the buffers is left out."""
    draw = random.Random(seed)
    pieces = [(0, times, 0, height)]
    while len(pieces) < count:
        lower, upper, bottom, top = pieces.pop(max(range(len(pieces)), key=lambda i: _size(pieces[i]) * draw.random()))
        if draw.random() < 0.5 and upper - lower > 1:
            at = draw.randint(lower + 1, upper - 1)
            pieces += [(lower, at, bottom, top), (at, upper, bottom, top)]
        elif top - bottom > 1:
            at = draw.randint(bottom + 1, top - 1)
            pieces += [(lower, upper, bottom, at), (lower, upper, at, top)]
        else:
            pieces.append((lower, upper, bottom, top))
    draw.shuffle(pieces)
    kept = pieces[: count - round(gap * count)]
    return [(lower, upper, top - bottom) for lower, upper, bottom, top in kept]


def _size(piece: tuple[int, int, int, int]) -> int:
    lower, upper, bottom, top = piece
    return (upper - lower) * (top - bottom)


def load(rows: list[Row]) -> int:
    """The most bytes that are live at one time."""
    return max((sum(size for a, b, size in rows if a <= time < b) for time, _, _ in rows), default=0)


def full_rows(seed: int, times: int, height: int) -> list[Row]:
    """Buffers of which exactly ``height`` bytes are live at every time; they may need more than that."""
    draw = random.Random(seed)
    live, rows = [(0, size) for size in _parts(draw, height)], []
    for time in range(1, times):
        draw.shuffle(live)
        gone = live[: draw.randint(1, len(live))]
        rows += [(lower, time, size) for lower, size in gone]
        live = live[len(gone) :] + [(time, size) for size in _parts(draw, sum(size for _, size in gone))]
    return rows + [(lower, times, size) for lower, size in live]


def _parts(draw: random.Random, total: int) -> list[int]:
    parts = []
    while total:
        parts.append(draw.randint(1, total))
        total -= parts[-1]
    return parts


def least(buffers: Buffers) -> int:
    """The fewest bytes that a placement takes up: of all capacities from the load on the first for which some offsets do."""
    return next(c for c in itertools.count(buffers.load_bytes) if fits(buffers, c))


def fits(buffers: Buffers, capacity: int) -> bool:
    """Whether there is a placement, by trying all offsets."""
    rows = sorted(zip(buffers.lower.tolist(), buffers.upper.tolist(), buffers.padded.tolist(), strict=True))
    placed: list[tuple[int, int, int]] = []  # upper, from, to

    def rest(i: int) -> bool:
        if i == len(rows):
            return True
        lower, upper, size = rows[i]
        taken = [(start, end) for until, start, end in placed if until > lower]
        for offset in range(0, capacity - size + 1, buffers.alignment):
            if all(offset + size <= start or end <= offset for start, end in taken):
                placed.append((upper, offset, offset + size))
                if rest(i + 1):
                    return True
                placed.pop()
        return False

    return rest(0)


def overlapping(buffers: Buffers, offsets: list[int]) -> bool:
    """Whether two buffers share a byte at some time, by looking at all pairs."""
    rows = list(zip(buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), offsets, strict=True))
    for (a, b, size, at), (c, d, other, where) in itertools.combinations(rows, 2):
        together = range(max(a, c), min(b, d))
        shared = range(max(at, where), min(at + size, where + other))
        if together and shared:
            return True
    return False
