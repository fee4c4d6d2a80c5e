"""The memory constraints of Checkmate's programs: stages in program order, and stages in any order.

``ordered_memory`` counts what is resident at every step of a stage that runs in program order. ``any_order_memory``
counts at each recompute only what is there wherever in the stage it happens and however often: its inputs, what it
allocates, what was handed to the caller, and P[t, s] >= (s lives when the stage's node runs) - R[t, base(s)], which is
what passes through the whole stage. Both count the stage's own node, which runs last, exactly.
"""

from __future__ import annotations

from bisect import bisect_right

from lowtide.solve.milp.columns import StageColumns
from lowtide.solve.milp.program import INFINITY
from lowtide.solve.milp.tables import ONE, ZERO, Stage


def ordered_memory(plan: StageColumns, index: int) -> None:
    """Bytes resident while each node of the stage runs, as a chain: each step differs little from the one before."""
    stage = plan.stages[index]
    nodes = [*stage.recompute, *([stage.target] if stage.target >= 0 else [])]
    changes: list[dict[int, float]] = [{} for _ in range(len(nodes) + 1)]
    scale = plan.scale.bytes
    for storage in {**plan.stored[index], **{s: 0 for n in stage.recompute for s in plan.reach.owns[n]}}:
        size = float(plan.model.storage_bytes[storage]) * scale
        _put(changes, _lives(plan, index, nodes, storage), size)
    for node in plan.saved[index]:
        after = (bisect_right(nodes, node), plan.saved[index + 1].get(node, ZERO))
        _put(changes, [(0, plan.saved[index][node]), after], float(plan.model.rng_state_bytes) * scale)
    for position, node in enumerate(nodes):
        column = stage.recompute.get(node, ONE)
        own = sum(int(plan.model.storage_bytes[s]) for s in plan.reach.owns[node])
        size = float(own + int(plan.model.workspace_bytes[node])) * scale
        _put(changes, [(position, column), (position + 1, ZERO)], size)
    if stage.target >= 0 and stage.target in plan.saved[index + 1]:
        kept = plan.saved[index + 1][stage.target]
        _put(changes, [(len(nodes) - 1, kept)], float(plan.model.rng_state_bytes) * scale)
    _resident(plan, changes[:-1])


def _lives(plan: StageColumns, index: int, nodes: list[int], storage: int) -> list[tuple[int, int]]:
    """(position, column) pairs: from that position on the storage lives where the column is 1."""
    stage, base = plan.stages[index], plan.reach.base[storage]
    before, after = plan.stored[index].get(storage, ZERO), plan.stored[index + 1].get(storage, ZERO)
    if plan.model.held[storage] or (before == ONE and after == ONE):
        return [(0, ONE)]
    lives = [(0, before)] if base in stage.recompute else []
    position = bisect_right(nodes, base) if base in stage.recompute else 0
    users = plan.users(stage, storage)
    columns = _alive(plan, stage, users, before, after)
    for user, column in zip(users, columns, strict=True):
        lives.append((position, column))
        position = bisect_right(nodes, user)
    return [*lives, (position, after)]


def _alive(plan: StageColumns, stage: Stage, users: list[int], before: int, after: int) -> list[int]:
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
            column = plan.rows.add_column(0.0, 0.0, 1.0)
            plan.at_most(use, [column])
            plan.at_most(later, [column])
            later = column
        columns.append(later)
    return columns[::-1]


def _resident(plan: StageColumns, changes: list[dict[int, float]]) -> None:
    room = INFINITY if plan.budget_bytes is None else plan.scale.room
    constant, previous = 0.0, ZERO
    for change in changes:
        constant += change.pop(ONE, 0.0)
        change.pop(ZERO, None)
        column = plan.rows.add_column(0.0, 0.0 if room >= constant else -INFINITY, room - constant)
        entries = {column: -1.0, **{k: v for k, v in change.items() if v != 0.0}}
        if previous >= 0:
            entries[previous] = 1.0
        plan.rows.add_row(list(entries), list(entries.values()), 0.0, 0.0)
        if plan.peak >= 0:
            plan.rows.add_row([column, plan.peak], [1.0, -1.0], upper=-constant)
        previous = column


def any_order_memory(plan: StageColumns, index: int) -> None:
    """What is resident during each step whatever the order of the stage: P[t, s], storages that are there from
    the beginning to the end, and what the step itself reads and allocates."""
    stage, after = plan.stages[index], plan.stored[index + 1]
    target_reads = set(plan.reach.reads[stage.target])
    through: dict[int, int] = {}
    at_target: dict[int, int] = {}
    for storage in plan.stored[index].keys() | {s for n in stage.recompute for s in plan.reach.owns[n]}:
        end = ONE if storage in target_reads or plan.model.held[storage] else after.get(storage, ZERO)
        at_target[storage] = end
        made = stage.recompute.get(plan.reach.base[storage], ZERO)
        if made == ZERO or end == ZERO or plan.model.held[storage]:
            through[storage] = end
        else:
            through[storage] = plan.rows.add_column(0.0, 0.0, 1.0)
            plan.at_most(end, [through[storage], made])
    states = [(column, float(plan.model.rng_state_bytes)) for column in plan.saved[index + 1].values()]
    sizes = plan.model.storage_bytes
    _within(
        plan, _total([*((at_target[s], float(sizes[s])) for s in at_target), *states, (ONE, _own(plan, stage.target))])
    )
    if not stage.recompute:
        return
    total = plan.rows.add_column()
    entries = _total([*((through[s], float(sizes[s])) for s in through), *states])
    constant = entries.pop(ONE, 0.0) * plan.scale.bytes
    values = [value * plan.scale.bytes for value in entries.values()]
    plan.rows.add_row([*entries, total], [*values, -1.0], upper=-constant)
    for node, column in stage.recompute.items():
        entries = _total([(total, 1.0 / plan.scale.bytes), (column, _own(plan, node))])
        for storage in plan.reach.reads[node]:
            _add_read(plan, entries, column, through.get(storage, ZERO), float(sizes[storage]))
        _within(plan, entries)


def _own(plan: StageColumns, node: int) -> float:
    """Bytes that a node's run adds: its storages and workspace."""
    sizes = plan.model.storage_bytes
    return float(sum(int(sizes[s]) for s in plan.reach.owns[node]) + int(plan.model.workspace_bytes[node]))


def _add_read(plan: StageColumns, entries: dict[int, float], runs: int, through: int, size: float) -> None:
    """What a step reads is resident, beyond what is counted as there throughout."""
    if through == ONE:
        return
    either = runs
    if through != ZERO:
        either = plan.rows.add_column(0.0, 0.0, 1.0)
        plan.at_most(runs, [either])
        plan.at_most(through, [either])
        entries[through] = entries.get(through, 0.0) - size
    entries[either] = entries.get(either, 0.0) + size


def _within(plan: StageColumns, entries: dict[int, float]) -> None:
    """A sum of bytes is at most the budget, or the peak."""
    constant = entries.pop(ONE, 0.0) * plan.scale.bytes
    values = [value * plan.scale.bytes for value in entries.values()]
    if plan.peak >= 0:
        plan.rows.add_row([*entries, plan.peak], [*values, -1.0], upper=-constant)
    else:
        plan.rows.add_row(list(entries), values, upper=plan.scale.room - constant)


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
