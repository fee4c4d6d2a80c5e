"""Every order-preserving schedule of a tiny graph, explored on the graph itself, apart from ``lowtide.solve``.

A state is what the checker and the simulator look at: the latest first compute, effects run, live storages, live
values, saved generator states, whether the forward outputs were handed over. Uniform-cost search over all of them.

Every answer is kept: for the process, and in a file for the next run. It is named after this file's contents and found by
the whole graph and its costs, so neither a change here nor one of the graphs is answered from what was.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lowtide.ir import Costs, Graph, Phase


class State(NamedTuple):
    latest: int
    computed: frozenset[int]
    storages: frozenset[int]
    values: frozenset[int]
    saved: frozenset[int]
    handed: bool


def brute_force(graph: Graph, costs: Costs, budget: int | None) -> int | None:
    """The least time within the budget, ``None`` if nothing fits; with no budget the least peak."""
    return remembered(Path(__file__), graph, costs, budget, _brute_force)


def remembered(
    source: Path,
    graph: Graph,
    costs: Costs,
    budget: int | None,
    find: Callable[[Graph, Costs, int | None], int | None],
) -> int | None:
    """What ``find``, of the file ``source``, answers, or has answered to the same question before."""
    columns = [costs.time_ns, costs.workspace_bytes, costs.storage_bytes]
    memory = () if costs.second_memory is None else (costs.second_memory,)
    asked = repr((graph, [column.tolist() for column in columns], costs.rng_state_bytes, budget, *memory))
    key = hashlib.sha256(asked.encode()).hexdigest()
    known = _known(source)
    if key not in known:
        known[key] = find(graph, costs, budget)
    return known[key]


@functools.cache
def _known(source: Path) -> dict[str, int | None]:
    """Answers by what was asked; written down at the end of the process."""
    name = f"{source.stem.replace('_', '-')}-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.json"
    path = Path(__file__).parents[2] / ".pytest_cache" / name
    answers = _read(path)
    atexit.register(_write, path, answers)
    return answers


def _read(path: Path) -> dict[str, int | None]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(path.read_text()))
    return {}


def _write(path: Path, answers: dict[str, int | None]) -> None:
    """With what other processes wrote meanwhile."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        whole = path.with_suffix(f".{os.getpid()}.tmp")
        whole.write_text(json.dumps(_read(path) | answers))
        whole.replace(path)


def _brute_force(graph: Graph, costs: Costs, budget: int | None) -> int | None:
    outside = frozenset(value.id for value in graph.values if value.producer is None)
    external = frozenset(storage.id for storage in graph.storages if storage.external)
    start = State(-1, frozenset(), external, outside, frozenset(), False)
    ticket = itertools.count()
    best = {start: (0, 0)}
    queue = [((0, 0), next(ticket), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if best[state] < cost:
            continue
        if _done(graph, state):
            return max(cost[0], graph.fixed_bytes) if budget is None else cost[0]
        for after, time, during in _steps(graph, costs, state):
            if budget is not None and during > budget:
                continue
            key = (max(cost[0], during), cost[1] + time) if budget is None else (cost[0] + time, 0)
            if after not in best or key < best[after]:
                best[after] = key
                heapq.heappush(queue, (key, next(ticket), after))
    return None


def _done(graph: Graph, state: State) -> bool:
    effects = all(op.id in state.computed for op in graph.ops if op.effect)
    return state.handed and effects and state.values.issuperset(graph.outputs)


def _steps(graph: Graph, costs: Costs, state: State) -> Iterator[tuple[State, int, int]]:
    held = _held(graph, state)
    if not state.handed and state.values.issuperset(graph.forward_outputs):
        yield state._replace(handed=True), 0, 0
    for storage in state.storages:
        if not graph.storages[storage].external and storage not in held:
            dead = frozenset(graph.storages[storage].values)
            yield state._replace(storages=state.storages - {storage}, values=state.values - dead), 0, 0
    for op in state.saved:
        yield state._replace(saved=state.saved - {op}), 0, 0
    for op in range(len(graph.ops)):
        yield from _compute(graph, costs, state, op)


def _held(graph: Graph, state: State) -> set[int]:
    """What the caller has been handed, which is never freed from then on."""
    return {graph.values[value].storage for value in graph.forward_outputs} if state.handed else set()


def _compute(graph: Graph, costs: Costs, state: State, op_id: int) -> Iterator[tuple[State, int, int]]:
    op = graph.ops[op_id]
    own = frozenset(storage.id for storage in graph.storages if storage.base == op_id)
    view = not own and not op.effect and not op.random
    again = op_id in state.computed
    if not state.values.issuperset(op.inputs) or (again and not op.recomputable):
        return
    if again and op.random and op_id not in state.saved:
        return
    if not state.handed and op.phase is Phase.BACKWARD:
        return
    if not again and not view and (op_id < state.latest or (state.handed and op.phase is Phase.FORWARD)):
        return
    if {graph.values[value].storage for value in op.outputs} - own - state.storages:
        return
    for saves in (False, True) if op.random and not again else (False,):
        saved = state.saved | {op_id} if saves else state.saved
        during = graph.fixed_bytes + int(costs.workspace_bytes[op_id]) + len(saved) * costs.rng_state_bytes
        during += sum(int(costs.storage_bytes[s]) for s in state.storages) + sum(
            int(costs.storage_bytes[s]) for s in own
        )
        after = State(
            latest=state.latest if again or view else op_id,
            computed=state.computed if view else state.computed | {op_id},
            storages=state.storages | own,
            values=state.values | set(op.outputs),
            saved=saved,
            handed=state.handed,
        )
        yield after, int(costs.time_ns[op_id]), during
        for storage in (
            {graph.values[value].storage for value in op.overwrites} - _held(graph, state)
            if not own & state.storages
            else ()
        ):
            dead = frozenset(graph.storages[storage].values)
            over = after._replace(storages=after.storages - {storage}, values=after.values - dead)
            yield over, int(costs.time_ns[op_id]), during - int(costs.storage_bytes[storage])
