"""The linear relaxation behind the time bounds: what must be kept or recomputed across a few instants.

Glossary: a *cut* is the instant at which some node is first computed; the cuts t_1 < ... < t_K split the program into
*gaps* (the last one reaches the end; before t_1 everything is free). For every *window* of consecutive gaps that is looked
at, from cut a to cut e, with s a storage computed before cut a and p(s) its node:

    S[a, s]      s is live at cut a                                R[a, e, i]   node i is recomputed in the window
    S[a, s] + R[a, e, p(s)] >= 1               s is read by a first compute inside the window
    S[a, s] + R[a, e, p(s)] >= S[e, s]         what is live at its end was kept or recomputed
    S[a, s] + R[a, e, p(s)] >= R[a, e, j]      for every s that node j reads: recomputing needs the inputs
    sum of R[f, g, i] over its parts >= R[a, e, i]             its parts are gaps or shorter windows that cover it
    sum of bytes(s) S[a, s] <= budget less what the node of cut a allocates, needs as workspace and has beside it for certain
    the same with bytes and what is left rounded down to whole units of some size

The cost is the time of the recomputes counted once per gap. Every schedule within the budget gives a solution that
costs no more than it does, so the minimum, any dual solution's value too, bounds every schedule. What holds for gaps
implies nothing of the sort for windows in the linear relaxation: fractions add up over gaps, so windows count. Every gap
has to be among the windows; which others are is free (``all_windows`` for a few cuts, ``refine`` for many).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.solve.bounds.liveness import Liveness
from lowtide.solve.model.compact import Flags, Indices, Numbers

_WORTH = 1.05  # times as much as bytes: below, whole units only slow the multipliers down

Floats = npt.NDArray[np.float64]
Key = tuple[str, int, int]
Window = tuple[int, int]
"""The nodes of the cuts at which it begins and ends; ``nodes + 1`` is the end of the program."""
Windows = Mapping[Window, Sequence[Window]]
"""Windows with their parts, none for gaps."""


@dataclass(frozen=True, slots=True, eq=False)
class IndexBlock:
    """Rows or columns of one kind and one window, from ``first`` on; ``members`` are the nodes, storages or reads
    that they stand for. The key is the kind and the nodes of the window's cuts."""

    key: Key
    first: int
    members: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Covering:
    """Minimise ``cost @ x`` with ``A x >= right`` and 0 <= x <= 1; rows are in compressed form. ``cost`` is in shares
    of the program's time; ``weight`` is a storage's share of the budget for the S columns, 0 for the others."""

    cuts: tuple[int, ...]
    windows: Windows
    row_blocks: tuple[IndexBlock, ...]
    column_blocks: tuple[IndexBlock, ...]
    cost: Floats
    weight: Floats
    start: Indices
    index: Indices
    value: Floats
    right: Floats
    matrix: core.Matrix  # A by rows and by columns


def relax(live: Liveness, windows: Windows) -> Covering:
    """The relaxation that looks at the cuts at which windows begin."""
    return _Builder(live, windows).build()


def all_windows(cuts: Sequence[int], nodes: int) -> Windows:
    """Every window between ascending ``cuts`` of a program of ``nodes`` nodes, each with its gaps."""
    line = [*cuts, nodes + 1]
    gaps = list(zip(line[:-1], line[1:], strict=True))
    spans = ((a, e) for a in range(len(cuts)) for e in range(a + 1, len(line)))
    return {(line[a], line[e]): gaps[a:e] if e > a + 1 else () for a, e in spans}


class _Builder:
    """Columns and rows under construction; tables hold column numbers, -1 where there is none."""

    def __init__(self, facts: Liveness, windows: Windows) -> None:
        self.facts = facts
        self.model = facts.model
        self.windows = windows
        self.cuts = sorted({begin for begin, _ in windows})
        self.base = self.model.storage_node.astype(np.int64)
        self.costs: list[Floats] = []
        self.weights: list[Floats] = []
        self.columns = 0
        self.entries: list[tuple[Numbers, Numbers, Floats]] = []
        self.rights: list[Floats] = []
        self.rows = 0
        self.certain: dict[int, Flags] = {}  # cut -> storage
        self.live: dict[int, Numbers] = {}  # cut -> storage -> column
        self.again: dict[Window, Numbers] = {}  # window -> node -> column
        self.row_blocks: list[IndexBlock] = []
        self.column_blocks: list[IndexBlock] = []

    def build(self) -> Covering:
        for cut in self.cuts:
            self._live_columns(cut)
        for window in self.windows:
            self._again_columns(window)
        for window in self.windows:
            self._window_rows(window)
        for cut in self.cuts:
            self._memory_rows(cut)
        rows, columns, values = (np.concatenate(parts) for parts in zip(*self.entries, strict=True))
        order = np.argsort(rows, kind="stable")
        start = np.zeros(self.rows + 1, np.int32)
        np.cumsum(np.bincount(rows, minlength=self.rows), out=start[1:])
        cost, index, value = np.concatenate(self.costs), columns[order].astype(np.int32), values[order]
        return Covering(
            cuts=tuple(self.cuts),
            windows=self.windows,
            row_blocks=tuple(self.row_blocks),
            column_blocks=tuple(self.column_blocks),
            cost=cost,
            weight=np.concatenate(self.weights),
            start=start,
            index=index,
            value=value,
            right=np.concatenate(self.rights),
            matrix=core.Matrix(start, index, value, len(cost)),
        )

    def _live_columns(self, cut: int) -> None:
        certain = self.facts.certain_at(cut)
        free = (self.base < cut) & ~certain & (self.facts.last_need >= cut)
        weights = self.model.storage_bytes[free] / max(self.facts.room_bytes, 1)
        self.certain[cut] = certain
        kept = np.zeros(len(free), np.int64) if self.facts.kept_ns is None else self.facts.kept_ns
        cost = kept[free] / max(int(self.model.time_ns.sum()), 1)
        self.live[cut] = self._add_columns(("live", cut, 0), free, cost, weights)

    def _again_columns(self, window: Window) -> None:
        """Nodes that have an open slot in the window; a recompute costs its time once per gap."""
        begin, last = window
        possible = np.zeros(self.model.nodes + 1, np.bool_)
        possible[:begin] = self.facts.open_slots[:begin, begin + 1 : last + 1].any(axis=1)
        cost = self.model.time_ns[possible] / max(int(self.model.time_ns.sum()), 1)
        cost = np.zeros(len(cost)) if self.windows[window] else cost
        self.again[window] = self._add_columns(("again", begin, last), possible, cost, np.zeros(len(cost)))

    def _add_columns(self, key: Key, chosen: Flags, cost: Floats, weight: Floats) -> Numbers:
        table = np.full(len(chosen), -1, np.int64)
        self.column_blocks.append(IndexBlock(key, self.columns, np.nonzero(chosen)[0]))
        table[chosen] = self.columns + np.arange(len(cost))
        self.columns += len(cost)
        self.costs.append(cost)
        self.weights.append(weight)
        return table

    def _window_rows(self, window: Window) -> None:
        model, (begin, last) = self.model, window
        live, again = self.live[begin], self.again[window]
        if self.windows[window]:
            nodes = np.nonzero(again >= 0)[0]
            parts = [(self.again[part][nodes], 1.0) for part in self.windows[window]]
            self._add_rows([*parts, (again[nodes], -1.0)], 0.0, ("link", begin, last), nodes)
        inside = (model.read_node > begin) & (model.read_node < last)
        open_before = (self.base < begin) & ~self.certain[begin]
        needed = np.zeros(len(self.base), np.bool_)
        needed[model.reads[inside]] = True
        if last in self.live:
            needed |= self.certain[last]
            kept = np.nonzero(open_before & ~needed & (self.live[last] >= 0))[0]
            terms = [(live[kept], 1.0), (again[self.base[kept]], 1.0), (self.live[last][kept], -1.0)]
            self._add_rows(terms, 0.0, ("keep", begin, last), kept)
        demanded = np.nonzero(open_before & needed)[0]
        terms = [(live[demanded], 1.0), (again[self.base[demanded]], 1.0)]
        self._add_rows(terms, 1.0, ("need", begin, last), demanded)
        built = np.nonzero((again[model.read_node] >= 0) & open_before[model.reads])[0]
        node, storage = model.read_node[built], model.reads[built]
        terms = [(live[storage], 1.0), (again[self.base[storage]], 1.0), (again[node], -1.0)]
        self._add_rows(terms, 0.0, ("build", begin, last), built)

    def _memory_rows(self, cut: int) -> None:
        """What is live fits, in bytes and in whole units of some size."""
        free = np.flatnonzero(self.live[cut] >= 0)
        left = self.facts.room_bytes - int(self.facts.instant_bytes[cut])
        room = max(self.facts.room_bytes, 1)
        self._add_memory_row(
            ("memory", cut, 0), self.live[cut][free], self.model.storage_bytes[free] / room, left / room
        )
        unit = _unit(self.model.storage_bytes[free], left)
        if unit > 0:
            whole, most = self.model.storage_bytes[free] // unit, left // unit
            counted = whole > 0
            scale = max(most, 1)
            columns = self.live[cut][free[counted]]
            self._add_memory_row(("units", cut, 0), columns, whole[counted] / scale, most / scale)

    def _add_memory_row(self, key: Key, columns: Numbers, weights: Floats, most: float) -> None:
        self.entries.append((np.full(len(columns), self.rows, np.int64), columns, -weights))
        self.rights.append(np.array([-most]))
        self.row_blocks.append(IndexBlock(key, self.rows, np.zeros(1, np.int64)))
        self.rows += 1

    def _add_rows(self, terms: Sequence[tuple[Numbers, float]], right: float, key: Key, members: Numbers) -> None:
        """One row per member: each term has one column per row (-1: absent) and a coefficient."""
        count = len(members)
        rows = self.rows + np.arange(count)
        self.row_blocks.append(IndexBlock(key, self.rows, members))
        for columns, coefficient in terms:
            there = columns >= 0
            self.entries.append((rows[there], columns[there], np.full(int(there.sum()), coefficient)))
        self.rights.append(np.full(count, right))
        self.rows += count


def _unit(sizes: Numbers, room_bytes: int) -> int:
    """The unit in which ``sizes`` and the room, all rounded down, say most about what fits. Where sizes are multiples of it,
    what is left of the room beside whole units is of no use. 0 where bytes say more."""
    total = int(sizes.sum())
    if room_bytes < 0 or total <= room_bytes:
        return 0
    units = np.unique(sizes[sizes > 0])
    whole = np.add.reduce(sizes[:, None] // units, axis=0)
    # How often everything fills the room, in units and in bytes; half a unit stands for none.
    filled = whole / np.maximum(room_bytes // units, 0.5)
    best = int(filled.argmax())
    return int(units[best]) if filled[best] > _WORTH * total / max(room_bytes, 1) else 0
