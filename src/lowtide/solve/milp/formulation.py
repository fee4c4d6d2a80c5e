"""What Checkmate's programs are made from: stages, units, the memory constraints, and how solutions are read.

``ordered_memory`` counts what is resident at every step of a stage that runs in program order. ``any_order_memory``
counts at each recompute only what is there wherever in the stage it happens and however often: its inputs, what it
allocates, what was handed to the caller, and P[t, s] >= (s lives when the stage's node runs) - R[t, base(s)], which is
what passes through the whole stage. Both count the stage's own node, which runs last, exactly.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lowtide.solve.milp.linear import INFINITY, Floats, LinearProgram, ProgramBuilder
from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.reach import Reach

ZERO, ONE = -1, -2  # in place of a column: the constant
Terms = Sequence[tuple[int, float]]
"""Columns, constants among them, and what they are multiplied by."""
_LARGEST = 1e6  # numbers in the program, roughly


@dataclass(frozen=True, slots=True)
class Scale:
    """Bytes are multiplied by ``bytes``; ``room`` is the budget so scaled, with half a byte unit to spare, which no
    sum of sizes can use. ``unit``: that of the objective, ``whole`` where it is the greatest common divisor."""

    bytes: float
    room: float
    unit: float
    whole: bool


def make_scale(model: CompactGraph, budget_bytes: int | None) -> Scale:
    """Sizes and times are divided by their greatest common divisors, or further where numbers stay too large."""
    sizes = np.concatenate([model.storage_bytes, model.workspace_bytes, [model.rng_state_bytes]])
    times = np.concatenate([model.time_ns, model.view_time_ns])
    size, time = max(int(np.gcd.reduce(sizes)), 1), max(int(np.gcd.reduce(times)), 1)
    room = int(model.storage_bytes.sum()) if budget_bytes is None else max(budget_bytes - model.fixed_bytes, 0)
    byte_unit = max(float(size), room / _LARGEST)
    spare = (room // size + 0.5) * size / byte_unit
    if budget_bytes is None:
        return Scale(1.0 / byte_unit, spare, byte_unit, byte_unit == size)
    time_unit = max(float(time), float(times.sum()) / _LARGEST)
    return Scale(1.0 / byte_unit, spare, time_unit, time_unit == time)


@dataclass(slots=True, eq=False)
class Formulation:
    """A program in stages, one per node, which runs at its end, and how to read its solutions. ``budget_bytes`` ``None``: the
    peak is minimised, in units of the scale, and ``peak`` is its column; otherwise the recompute time. ``recompute[t]``,
    ``stored[t]`` and ``saved[t]``: the columns R, S and G (or ZERO, ONE) of stage ``t`` by node, storage and random node."""

    model: CompactGraph
    budget_bytes: int | None
    ordered: bool = field(default=True, kw_only=True)
    rows: ProgramBuilder = field(default_factory=ProgramBuilder, kw_only=True)
    reach: Reach = field(init=False)
    scale: Scale = field(init=False)
    recompute: list[dict[int, int]] = field(init=False)
    stored: list[dict[int, int]] = field(init=False)
    saved: list[dict[int, int]] = field(init=False)
    peak: int = field(init=False)
    program: LinearProgram = field(init=False)

    def lasts(self, stage: int, storage: int) -> bool:
        """Whether the storage, once computed, is there throughout the stage."""
        return bool(self.model.held[storage] or (self.model.handed[storage] and stage > self.model.boundary))

    @property
    def absolute_gap(self) -> float:
        """The objective takes whole numbers only where its unit is the greatest common divisor."""
        return 0.99 if self.scale.whole else 1e-6

    def lower_bound(self, bound: float) -> int:
        """Nanoseconds (bytes where the peak is minimised) that follow from a bound on the objective."""
        if bound == -INFINITY:
            return 0
        safe = max(bound - 1e-2 - 1e-7 * abs(bound), 0.0)  # the solver's tolerances
        if self.scale.whole:
            safe = math.ceil(safe)
        base = self.model.fixed_bytes if self.budget_bytes is None else self.model.least_ns
        return base + int(safe * self.scale.unit)

    def sequence(self, values: Floats) -> list[int]:
        """Nodes in the order in which they are computed."""
        nodes: list[int] = []
        for target, recompute in enumerate(self.recompute):
            nodes.extend(node for node, column in recompute.items() if values[column] > 0.5)
            nodes.append(target)
        return nodes[:-1]

    def at_most(self, column: int, others: list[int]) -> None:
        """``column <= sum of others``, constants understood."""
        if column == ZERO or ONE in others:
            return
        index = [other for other in others if other >= 0]
        values = [-1.0] * len(index)
        if column == ONE:
            self.rows.add_row(index, values, upper=-1.0)
        elif column not in index:
            self.rows.add_row([column, *index], [1.0, *values], upper=0.0)

    def users(self, stage: int, storage: int) -> list[int]:
        """Those who may read the storage in the stage, ascending."""
        return [u for u in self.reach.readers[storage] if u in self.recompute[stage] or u == stage]

    def ordered_memory(self, stage: int) -> None:
        """Bytes resident while each node of the stage runs, as a chain: each step differs little from the one before."""
        recompute = self.recompute[stage]
        nodes = [*recompute, stage]
        changes: list[dict[int, float]] = [{} for _ in range(len(nodes) + 1)]
        scale = self.scale.bytes
        for storage in {**self.stored[stage], **{s: 0 for n in recompute for s in self.reach.owns[n]}}:
            size = float(self.model.storage_bytes[storage]) * scale
            _put(changes, self._lives(stage, nodes, storage), size)
        for node in self.saved[stage]:
            after = (bisect_right(nodes, node), self.saved[stage + 1].get(node, ZERO))
            _put(changes, [(0, self.saved[stage][node]), after], float(self.model.rng_state_bytes) * scale)
        for position, node in enumerate(nodes):
            column = recompute.get(node, ONE)
            own = sum(int(self.model.storage_bytes[s]) for s in self.reach.owns[node])
            size = float(own + int(self.model.workspace_bytes[node])) * scale
            _put(changes, [(position, column), (position + 1, ZERO)], size)
        if stage in self.saved[stage + 1]:
            kept = self.saved[stage + 1][stage]
            _put(changes, [(len(nodes) - 1, kept)], float(self.model.rng_state_bytes) * scale)
        self._resident(changes[:-1])

    def _lives(self, stage: int, nodes: list[int], storage: int) -> list[tuple[int, int]]:
        """(position, column) pairs: from that position on the storage lives where the column is 1."""
        recompute, base = self.recompute[stage], self.reach.base[storage]
        before, after = self.stored[stage].get(storage, ZERO), self.stored[stage + 1].get(storage, ZERO)
        if self.lasts(stage, storage) or (before == ONE and after == ONE):
            return [(0, ONE)]
        lives = [(0, before)] if base in recompute else []
        position = bisect_right(nodes, base) if base in recompute else 0
        users = self.users(stage, storage)
        columns = self._alive(recompute, users, before, after)
        for user, column in zip(users, columns, strict=True):
            lives.append((position, column))
            position = bisect_right(nodes, user)
        return [*lives, (position, after)]

    def _alive(self, recompute: dict[int, int], users: list[int], before: int, after: int) -> list[int]:
        """Columns A of one storage: at least the use by each user, and what comes after it."""
        columns: list[int] = []
        later = after
        for user in reversed(users):
            use = recompute.get(user, ONE)
            if use == ONE or later == ONE:
                later = ONE
            elif later == ZERO:
                later = use
            else:
                column = self.rows.add_column(0.0, 0.0, 1.0)
                self.at_most(use, [column])
                self.at_most(later, [column])
                later = column
            columns.append(later)
        return columns[::-1]

    def _resident(self, changes: list[dict[int, float]]) -> None:
        room = INFINITY if self.budget_bytes is None else self.scale.room
        constant, previous = 0.0, ZERO
        for change in changes:
            constant += change.pop(ONE, 0.0)
            change.pop(ZERO, None)
            column = self.rows.add_column(0.0, 0.0 if room >= constant else -INFINITY, room - constant)
            entries = {column: -1.0, **{k: v for k, v in change.items() if v != 0.0}}
            if previous >= 0:
                entries[previous] = 1.0
            self.rows.add_row(list(entries), list(entries.values()), 0.0, 0.0)
            if self.peak >= 0:
                self.rows.add_row([column, self.peak], [1.0, -1.0], upper=-constant)
            previous = column

    def any_order_memory(self, stage: int) -> None:
        """What is resident during each step whatever the order of the stage: P[t, s], storages that are there from
        the beginning to the end, and what the step itself reads and allocates."""
        recompute, after = self.recompute[stage], self.stored[stage + 1]
        target_reads = set(self.reach.reads[stage])
        through: dict[int, int] = {}
        at_target: dict[int, int] = {}
        for storage in self.stored[stage].keys() | {s for n in recompute for s in self.reach.owns[n]}:
            lasts = self.lasts(stage, storage)
            end = ONE if storage in target_reads or lasts else after.get(storage, ZERO)
            at_target[storage] = end
            made = recompute.get(self.reach.base[storage], ZERO)
            if made == ZERO or end == ZERO or lasts:
                through[storage] = end
            else:
                through[storage] = self.rows.add_column(0.0, 0.0, 1.0)
                self.at_most(end, [through[storage], made])
        states = [(column, float(self.model.rng_state_bytes)) for column in self.saved[stage + 1].values()]
        sizes = self.model.storage_bytes
        self._within(summed([*((at_target[s], float(sizes[s])) for s in at_target), *states, (ONE, self._own(stage))]))
        if not recompute:
            return
        total = self.rows.add_column()
        self._within(summed([*((through[s], float(sizes[s])) for s in through), *states]), total)
        for node, column in recompute.items():
            entries = summed([(total, 1.0 / self.scale.bytes), (column, self._own(node))])
            for storage in self.reach.reads[node]:
                self._add_read(entries, column, through.get(storage, ZERO), float(sizes[storage]))
            self._within(entries)

    def _own(self, node: int) -> float:
        """Bytes that a node's run adds: its storages and workspace."""
        sizes = self.model.storage_bytes
        return float(sum(int(sizes[s]) for s in self.reach.owns[node]) + int(self.model.workspace_bytes[node]))

    def _add_read(self, entries: dict[int, float], runs: int, through: int, size: float) -> None:
        """What a step reads is resident, beyond what is counted as there throughout."""
        if through == ONE:
            return
        either = runs
        if through != ZERO:
            either = self.rows.add_column(0.0, 0.0, 1.0)
            self.at_most(runs, [either])
            self.at_most(through, [either])
            entries[through] = entries.get(through, 0.0) - size
        entries[either] = entries.get(either, 0.0) + size

    def _within(self, entries: dict[int, float], most: int | None = None) -> None:
        """A sum of bytes is at most the column ``most``: the peak, or the budget where there is none."""
        most = self.peak if most is None else most
        constant = entries.pop(ONE, 0.0) * self.scale.bytes
        values = [value * self.scale.bytes for value in entries.values()]
        if most >= 0:
            self.rows.add_row([*entries, most], [*values, -1.0], upper=-constant)
        else:
            self.rows.add_row(list(entries), values, upper=self.scale.room - constant)


def summed(terms: Terms) -> dict[int, float]:
    """The sum of the terms by column, ``ONE`` for the constant."""
    total: dict[int, float] = {}
    for column, size in terms:
        if column != ZERO:
            total[column] = total.get(column, 0.0) + size
    return total


def _put(changes: list[dict[int, float]], lives: list[tuple[int, int]], size: float) -> None:
    """Enter that from each position on another column stands for ``size`` resident bytes."""
    last = ZERO
    for position, column in lives:
        change = changes[position]
        change[last] = change.get(last, 0.0) - size
        change[column] = change.get(column, 0.0) + size
        last = column
