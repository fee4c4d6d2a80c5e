"""Plans for rebuilding evicted nodes: which calls to run again, in which order, and when to release each result.

A sequence of calls determines a plan: a result lives from its call to the last call that reads it before it is made again,
and a call whose results nobody reads is left out. Nodes still in memory may be *given*: a given node replaces the result of
its first call, and is held until its last read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lowtide.dynamic.node import Node, OperatorCall
from lowtide.errors import ExecutionError

_PARTS = 16  # parts into which resident nodes are divided at most when choosing which to hold


class Rematerialization:
    """The rerun of a recorded call, as plans see it.

    ``reads`` and ``makes`` omit nodes that stay in memory under any plan. ``bytes``: of all results. ``scratch_bytes``: known
    extra memory while it runs. Instances are ordered as the calls were first made.
    """

    __slots__ = ("bytes", "cost_ns", "makes", "reads", "recorded", "scratch_bytes", "serial")

    def __init__(self, call: OperatorCall, node: Node, scratch_bytes: int) -> None:
        results = tuple(call.results.values())
        self.recorded = call
        self.reads = tuple(parent for parent in node.parents if not _stays(parent))
        self.makes = tuple(result for result in results if not _stays(result))
        self.bytes = sum(result.size_bytes for result in results)
        self.cost_ns = node.cost_ns
        self.scratch_bytes = scratch_bytes
        self.serial = min(result.serial for result in results)

    def __lt__(self, other: Rematerialization) -> bool:
        return self.serial < other.serial


def _stays(node: Node) -> bool:
    return node.resident and (node.call is None or node.pinned or node.locks > 0)


def calls_behind(
    targets: Iterable[Node], scratch_bytes: Callable[[OperatorCall], int], *, deep: bool = False
) -> tuple[list[Rematerialization], dict[Node, None]]:
    """Return the calls that compute ``targets``: back to resident nodes or, if ``deep``, to nodes that stay in memory.

    Each call follows those that it needs, just before it is first read; inputs made late come first. Also returns the nodes
    that are resident now and may be evicted.
    """
    calls: dict[OperatorCall, Rematerialization] = {}
    there: dict[Node, None] = {}
    seen: set[Node] = set()

    def needed(nodes: Iterable[Node]) -> Iterator[Node]:
        for node in latest_first(nodes):
            if node in seen or _stays(node):
                continue
            if node.resident:
                there[node] = None
            if deep or not node.resident:
                seen.add(node)
                yield node

    stack: list[tuple[Node | None, Iterator[Node]]] = [(None, needed(targets))]
    while stack:
        node, rest = stack[-1]
        parent = next(rest, None)
        if parent is not None:
            stack.append((parent, needed(parent.parents)))
            continue
        stack.pop()
        if node is None:
            continue
        if node.call is None:
            raise ExecutionError("a storage was evicted that can not be computed again")
        if node.call not in calls:
            calls[node.call] = Rematerialization(node.call, node, scratch_bytes(node.call))
    return list(calls.values()), there


def latest_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: -node.serial)


@dataclass(frozen=True, slots=True, eq=False)
class RebuildStep:
    """A call: the results to hold (``makes``), the inputs read for the last time (``done``), and the bytes held during it."""

    call: Rematerialization
    makes: tuple[Node, ...]
    done: tuple[Node, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class RebuildPlan:
    """Steps of a rebuild. ``given`` is held from the start. ``peak_bytes`` counts only given and made nodes, and scratch."""

    given: tuple[Node, ...]
    steps: tuple[RebuildStep, ...]
    peak_bytes: int


def make_plan(
    sequence: Sequence[Rematerialization], targets: Iterable[Node], given: Collection[Node] = ()
) -> RebuildPlan:
    """Return the plan for ``sequence`` with calls replaced by ``given`` nodes left out; unread given nodes are not held."""
    first: dict[Node, int] = {}
    if given:
        for index in range(len(sequence) - 1, -1, -1):
            first.update((node, index) for node in sequence[index].makes if node in given)
    needed = dict.fromkeys(targets)
    found: list[tuple[Rematerialization, tuple[Node, ...], tuple[Node, ...]]] = []
    for index in range(len(sequence) - 1, -1, -1):
        call = sequence[index]
        makes = tuple(n for n in call.makes if n in needed and first.get(n) != index)
        if not makes:
            continue
        for node in makes:
            del needed[node]
        done = tuple(node for node in call.reads if node not in needed)
        needed.update(dict.fromkeys(done))
        found.append((call, makes, done))
    level = peak = sum(node.size_bytes for node in needed)
    steps = []
    for call, makes, done in reversed(found):
        during = level + call.bytes + call.scratch_bytes
        peak = max(peak, during)
        steps.append(RebuildStep(call, makes, done, during))
        level += sum(node.size_bytes for node in makes) - sum(node.size_bytes for node in done)
    return RebuildPlan(tuple(needed), tuple(steps), peak)


def with_what_is_there(
    sequence: Sequence[Rematerialization], targets: Sequence[Node], there: Iterable[Node], room: int
) -> RebuildPlan:
    """Return a plan that holds as many of the resident nodes ``there`` as fit into ``room`` bytes, latest results first.

    It may exceed the room, but then by no more than if it held none of them.
    """
    latest = latest_first(there)
    plan = make_plan(sequence, targets, set(latest))
    if plan.peak_bytes <= room:
        return plan
    held: set[Node] = set()
    plan = make_plan(sequence, targets)
    least = max(1, len(latest) // _PARTS)
    waiting = [latest]
    while waiting:
        part = waiting.pop()
        trial = make_plan(sequence, targets, held.union(part))
        if trial.peak_bytes <= max(room, plan.peak_bytes):
            held.update(part)
            plan = trial
        elif len(part) > least:
            half = (len(part) + 1) // 2
            waiting += [part[half:], part[:half]]
    return plan
