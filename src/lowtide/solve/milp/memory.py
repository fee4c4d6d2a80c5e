"""The memory constraints of Checkmate's programs: stages in program order, and stages in any order.

``ordered_memory`` counts what is resident at every step of a stage that runs in program order. ``any_order_memory``
counts at each recompute only what is there wherever in the stage it happens and however often: its inputs, what it
allocates, what was handed to the caller, and P[t, s] >= (s lives when the stage's node runs) - R[t, base(s)], which is
what passes through the whole stage. Both count the stage's own node, which runs last, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from lowtide.solve.milp.formulation import ONE, ZERO, Formulation, FrontierStage
from lowtide.solve.milp.linear import INFINITY


@dataclass(slots=True, eq=False)
class StageMemory(Formulation):
    """The rows that keep a staged program's memory within the budget."""

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

    def users(self, stage: FrontierStage, storage: int) -> list[int]:
        """Those who may read the storage in the stage, ascending."""
        return [u for u in self.reach.readers[storage] if u in stage.recompute or u == stage.target]

    def ordered_memory(self, index: int) -> None:
        """Bytes resident while each node of the stage runs, as a chain: each step differs little from the one before."""
        stage = self.stages[index]
        nodes = [*stage.recompute, stage.target]
        changes: list[dict[int, float]] = [{} for _ in range(len(nodes) + 1)]
        scale = self.scale.bytes
        for storage in {**self.stored[index], **{s: 0 for n in stage.recompute for s in self.reach.owns[n]}}:
            size = float(self.model.storage_bytes[storage]) * scale
            _put(changes, self._lives(index, nodes, storage), size)
        for node in self.saved[index]:
            after = (bisect_right(nodes, node), self.saved[index + 1].get(node, ZERO))
            _put(changes, [(0, self.saved[index][node]), after], float(self.model.rng_state_bytes) * scale)
        for position, node in enumerate(nodes):
            column = stage.recompute.get(node, ONE)
            own = sum(int(self.model.storage_bytes[s]) for s in self.reach.owns[node])
            size = float(own + int(self.model.workspace_bytes[node])) * scale
            _put(changes, [(position, column), (position + 1, ZERO)], size)
        if stage.target in self.saved[index + 1]:
            kept = self.saved[index + 1][stage.target]
            _put(changes, [(len(nodes) - 1, kept)], float(self.model.rng_state_bytes) * scale)
        self._resident(changes[:-1])

    def _lives(self, index: int, nodes: list[int], storage: int) -> list[tuple[int, int]]:
        """(position, column) pairs: from that position on the storage lives where the column is 1."""
        stage, base = self.stages[index], self.reach.base[storage]
        before, after = self.stored[index].get(storage, ZERO), self.stored[index + 1].get(storage, ZERO)
        if self.lasts(stage, storage) or (before == ONE and after == ONE):
            return [(0, ONE)]
        lives = [(0, before)] if base in stage.recompute else []
        position = bisect_right(nodes, base) if base in stage.recompute else 0
        users = self.users(stage, storage)
        columns = self._alive(stage, users, before, after)
        for user, column in zip(users, columns, strict=True):
            lives.append((position, column))
            position = bisect_right(nodes, user)
        return [*lives, (position, after)]

    def _alive(self, stage: FrontierStage, users: list[int], before: int, after: int) -> list[int]:
        """Columns A of one storage: at least the use by each user, and what comes after it."""
        columns: list[int] = []
        later = after
        for user in reversed(users):
            use = stage.recompute.get(user, ONE)
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

    def any_order_memory(self, index: int) -> None:
        """What is resident during each step whatever the order of the stage: P[t, s], storages that are there from
        the beginning to the end, and what the step itself reads and allocates."""
        stage, after = self.stages[index], self.stored[index + 1]
        target_reads = set(self.reach.reads[stage.target])
        through: dict[int, int] = {}
        at_target: dict[int, int] = {}
        for storage in self.stored[index].keys() | {s for n in stage.recompute for s in self.reach.owns[n]}:
            lasts = self.lasts(stage, storage)
            end = ONE if storage in target_reads or lasts else after.get(storage, ZERO)
            at_target[storage] = end
            made = stage.recompute.get(self.reach.base[storage], ZERO)
            if made == ZERO or end == ZERO or lasts:
                through[storage] = end
            else:
                through[storage] = self.rows.add_column(0.0, 0.0, 1.0)
                self.at_most(end, [through[storage], made])
        states = [(column, float(self.model.rng_state_bytes)) for column in self.saved[index + 1].values()]
        sizes = self.model.storage_bytes
        self._within(
            _total([*((at_target[s], float(sizes[s])) for s in at_target), *states, (ONE, self._own(stage.target))])
        )
        if not stage.recompute:
            return
        total = self.rows.add_column()
        self._within(_total([*((through[s], float(sizes[s])) for s in through), *states]), total)
        for node, column in stage.recompute.items():
            entries = _total([(total, 1.0 / self.scale.bytes), (column, self._own(node))])
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


def _total(terms: list[tuple[int, float]]) -> dict[int, float]:
    """The sum of the terms by column."""
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
