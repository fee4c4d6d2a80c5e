"""The dynamic program of ``pofo``: which blocks of a chain are saved, run again or moved, on a clock of two links.

Glossary (bytes; times in ns): ``M`` the budget for what is counted here; ``F_i``, ``B_i`` forward and backward time of block i;
``o_i`` and ``p_i`` the peaks of block i in both passes when all that it computes is saved, ``q(i, k)`` that of running block k
when the segment began with block i; ``s_i`` what block i saves, ``C_i`` what comes into it; ``T(m, i, j)`` rotor's time for
blocks i to j - 1, forward and backward, in m bytes (``lowtide.solve.blocks.table``); ``u``, ``v`` bytes per ns to the second
memory and back. Where blocks have a menu of options, saving is one case per option, whose recomputes count to ``B_i``.

A state stands before block i, with ``x`` bytes that were just made (``C_i`` or what block i - 1 saved), ``A`` that stay until
they are read in the backward pass, ``f`` that have yet to leave, and ``g`` that have to be back before the backward pass is
done with block i: it is followed from both ends of the step at once. Its time is that of everything outside of blocks i and
later. From there, and each of them with ``x`` kept (``A' = A + x``) or moved (``f' = f' + x, g' = g' + x``):

    save block i:         e = max(0, o_i + f + x + A - M),  d = max(0, p_i + g + x + A - M)
                          t' = t + F_i + B_i + e / u + d / v
                          f' = max(0, f - u F_i - e),  g' = max(0, g - v B_i - d)
    run i to j - 1 again: e = max over k of q(i, k) + f - u (F_i + ... + F_(k-1)) + x + A - M, at least 0;
                          r = g or r = 0 bytes are set aside for what comes back meanwhile;  T' = T(M - A - x - r, i, j)
                          t' = t + F_i + ... + F_(j-1) + e / u + T' + B_i + ... + B_(j-1) + (g - r) / v
                          f' = max(0, f - u (F_i + ... + F_(j-1)) - e),  g' = max(0, r - v (T' + B_i + ... + B_(j-1)))
    end with i to L - 1:  rotor runs them in M - A - x - r bytes, r = max(f, g) or 0; what was not set aside is waited for

States whose three figures fall into the same of ``cells`` parts each, and those that a quicker one with no more of any
undercuts, are one: exact figures are kept with the quickest, so that nothing is rounded up again and again. At most L^2 cells^3
steps, of which far fewer are reached.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.solve.blocks.table import Table

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
_NEVER = 2.0**61


class Segment(NamedTuple):
    """Blocks ``low .. high - 1``, run again in so many slots of the table, or one that is saved by its option ``~slots``.
    ``moved``: whether what came into it moves; ``first``: the block from which on that was made."""

    low: int
    high: int
    slots: int
    moved: bool
    first: int


class _States(NamedTuple):
    """Columns, one row a state. ``parent`` is a row of ``_Rows``; ``first``: the block from which on ``x`` was made."""

    kept: Floats
    leaving: Floats
    coming: Floats
    made: Floats
    first: Indices
    time: Floats
    parent: Indices
    slots: Indices
    moved: npt.NDArray[np.bool_]

    def take(self, rows: npt.NDArray[np.bool_] | Indices) -> _States:
        return _States._make(column[rows] for column in self)


def _joined(parts: list[_States]) -> _States:
    return _States._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


@dataclass(slots=True)
class ChainTable:
    """Runs the recurrence on rotor's ``table`` for ``budget_bytes``, ``fixed_bytes`` apart."""

    table: Table
    budget_bytes: int
    leave_rate: float  # bytes per ns
    come_rate: float
    cells: int
    backward_ns: Floats
    forward_ns: Floats
    rows: list[tuple[int, _States]] = field(default_factory=list)  # the block before which they stand, and states
    ends: list[tuple[float, int, int]] = field(default_factory=list)  # time, row of the last state, slots of the rest

    @property
    def room(self) -> float:
        return float(self.budget_bytes - self.table.chain.constant_bytes)

    def solve(self) -> list[Segment] | None:
        """The segments of the quickest way, in order; ``None`` where there is none."""
        blocks = self.table.chain.blocks
        nothing, zero = np.zeros(1), np.zeros(1, np.int64)
        start = _States(nothing, nothing, nothing, nothing, zero, nothing, zero - 1, zero, zero > 0)
        waiting: list[list[_States]] = [
            [] for _ in range(2 * (blocks + 1))
        ]  # by block, and whether the one before is saved
        waiting[0].append(start)
        count = 0
        for block in range(blocks + 1):
            for saved in (False, True):
                parts = [states for states in waiting[2 * block + saved] if len(states.time)]
                if not parts:
                    continue
                states = self._best(_joined(parts))
                self.rows.append((block, states))
                numbers = np.arange(count, count + len(states.time))
                count += len(states.time)
                self._end(block, states, numbers)
                if block < blocks:
                    waiting[2 * block + 3] += self._saving(block, states, numbers)
                    for high in range(block + 1, blocks):
                        waiting[2 * high] += self._again(block, high, states, numbers)
        return self._way() if self.ends else None

    def _best(self, states: _States) -> _States:
        """One state per cell, none that another undercuts."""
        unit = max(self.room, 1.0) / self.cells
        columns = (states.kept, states.leaving, states.coming)
        place = tuple(np.minimum((column / unit).astype(np.int64), self.cells) for column in columns)
        grid = np.full((self.cells + 1,) * 3, np.inf)
        np.minimum.at(grid, place, states.time)
        for axis in range(3):
            np.minimum.accumulate(grid, axis=axis, out=grid)
        good = np.flatnonzero(states.time <= grid[place])
        flat = np.ravel_multi_index(tuple(column[good] for column in place), grid.shape)
        return states.take(good[np.unique(flat, return_index=True)[1]])

    def _saving(self, block: int, states: _States, numbers: Indices) -> list[_States]:
        costs, unit = self.table.costs, self.table.unit_bytes
        free = self.room - states.kept - states.made
        found = []
        for option in range(int(costs.start[block]), int(costs.start[block + 1])):
            forward, backward = (
                int(peak[option]) * unit for peak in (costs.option_forward_peak, costs.option_backward_peak)
            )
            early = np.maximum(forward + states.leaving - free, 0.0)
            late = np.maximum(backward + states.coming - free, 0.0)
            times = self.forward_ns[block], self.backward_ns[block] + float(costs.extra_ns[option])
            after = states._replace(
                leaving=np.maximum(states.leaving - times[0] * self.leave_rate - early, 0.0),
                coming=np.maximum(states.coming - times[1] * self.come_rate - late, 0.0),
                time=states.time + sum(times) + early / self.leave_rate + late / self.come_rate,
                parent=numbers,
                slots=np.full(len(numbers), int(costs.start[block]) - option - 1),
            )
            fits = np.flatnonzero(free >= max(forward, backward))
            found += self._chosen(after.take(fits), float(costs.saved[option]) * unit, block)
        return found

    def _again(self, low: int, high: int, states: _States, numbers: Indices) -> list[_States]:
        costs, unit = self.table.costs, self.table.unit_bytes
        free = self.room - states.kept - states.made
        blocks = np.arange(low, high)
        peaks = (costs.crossing[low, blocks] + costs.forward_peak[blocks, blocks + 1]) * unit
        elapsed = np.concatenate([[0.0], np.cumsum(self.forward_ns[low:high])])
        fits = np.flatnonzero(free >= peaks.max())
        states, numbers, free = states.take(fits), numbers[fits], free[fits]
        drained = float((peaks - self.leave_rate * elapsed[:-1]).max())
        early = np.maximum(drained + states.leaving - free, 0.0)
        gone = elapsed[-1] * self.leave_rate + early
        found = []
        for aside in (states.coming, np.zeros_like(states.coming)):
            slots = ((free - aside) // unit).astype(np.int64)
            taken = self._rotor(low, high, slots) + self.backward_ns[low:high].sum()
            after = states._replace(
                leaving=np.maximum(states.leaving - gone, 0.0),
                coming=np.maximum(aside - taken * self.come_rate, 0.0),
                time=states.time
                + elapsed[-1]
                + taken
                + early / self.leave_rate
                + (states.coming - aside) / self.come_rate,
                parent=numbers,
                slots=slots,
            )
            found += self._chosen(after.take(taken < _NEVER), float(costs.crossing[low, high]) * unit, low)
        return found

    def _chosen(self, after: _States, made: float, first: int) -> list[_States]:
        """With what was made before them kept, and moved."""
        following = {"made": np.full(len(after.time), made), "first": np.full(len(after.time), first)}
        kept = after._replace(kept=after.kept + after.made, moved=np.zeros(len(after.time), np.bool_), **following)
        moved = after._replace(
            leaving=after.leaving + after.made,
            coming=after.coming + after.made,
            moved=np.ones(len(after.time), np.bool_),
            **following,
        )
        return [kept, moved.take(after.made > 0)]

    def _rotor(self, low: int, high: int, slots: Indices) -> Floats:
        most = self.table.best_ns.shape[2] - 1
        times: Floats = self.table.best_ns[low, high, np.clip(slots, 0, most)].astype(np.float64)
        return np.where(slots >= 0, times, _NEVER)

    def _end(self, block: int, states: _States, numbers: Indices) -> None:
        """The quickest ways to end from these states."""
        blocks, unit = self.table.chain.blocks, self.table.unit_bytes
        links = states.leaving / self.leave_rate + states.coming / self.come_rate
        most = np.maximum(states.leaving, states.coming)
        for aside in (most, np.zeros_like(most)):
            free = ((self.room - states.kept - states.made - aside) // unit).astype(np.int64)
            taken = np.zeros_like(links)
            if block < blocks:
                taken = self._rotor(block, blocks, free) + self.backward_ns[block:].sum()
            else:
                taken = np.where(free >= 0, taken, _NEVER)
            waits = np.where(aside > 0, np.maximum(links - taken, 0.0), links)
            times = states.time + taken + waits
            best = int(np.argmin(times))
            if times[best] < _NEVER:
                self.ends.append((float(times[best]), int(numbers[best]), int(free[best])))

    def _way(self) -> list[Segment]:
        _, row, slots = min(self.ends)
        block, first, parent, _, _ = self._row(row)
        segments = [Segment(block, self.table.chain.blocks, slots, False, first)]
        while parent >= 0:
            high, _, _, slots, moved = self._row(row)
            low, first, above, _, _ = self._row(parent)
            segments.append(Segment(low, high, slots, moved, first))
            row, parent = parent, above
        return [segment for segment in segments[::-1] if segment.low < segment.high]

    def _row(self, row: int) -> tuple[int, int, int, int, bool]:
        """The block before which a state stands, then four of its columns."""
        for block, states in self.rows:
            if row < len(states.time):
                columns = states.first, states.parent, states.slots, states.moved
                first, parent, slots, moved = (column[row] for column in columns)
                return block, int(first), int(parent), int(slots), bool(moved)
            row -= len(states.time)
        raise AssertionError("no such state")
