"""What evicted nodes are computed from: the calls that may have to be made again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lowtide.dynamic.node import Node, OperatorCall
from lowtide.errors import ExecutionError

ScratchBytes = Callable[[OperatorCall], int]


class Rematerialization:
    """Making a recorded call again, as plans see it.

    ``reads`` and ``makes``: without what stays where it is whatever is planned. ``bytes``: of all results. ``scratch_bytes``:
    what it takes on top while it runs, as far as that is known. ``serial``: calls were made in this order.
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


class Ancestry:
    """The calls from which ``targets`` follow: back to what is there or, ``deep``, to what cannot be computed again.

    ``calls``: each after those that it needs, late ones' needs first, each just before it is first read. ``there``: what is in
    memory now and may go.
    """

    def __init__(self, targets: Sequence[Node], scratch: ScratchBytes, *, deep: bool = False) -> None:
        self.targets = tuple(targets)
        self.deep = deep
        self.scratch = scratch
        self.calls: list[Rematerialization] = []
        self.there: dict[Node, None] = {}
        self._known: set[OperatorCall] = set()
        self._walk()

    def in_program_order(self) -> list[Rematerialization]:
        return sorted(self.calls, key=lambda call: call.serial)

    def _walk(self) -> None:
        seen: set[Node] = set()
        stack: list[tuple[Node | None, Iterator[Node]]] = [(None, iter(_latest_first(self.targets)))]
        while stack:
            node, parents = stack[-1]
            missing = next((p for p in parents if p not in seen and self._must_follow(p)), None)
            if missing is not None:
                seen.add(missing)
                stack.append((missing, iter(_latest_first(missing.parents))))
                continue
            stack.pop()
            if node is not None:
                self._add_call_of(node)

    def _add_call_of(self, node: Node) -> None:
        call = node.call
        if call is None:
            raise ExecutionError("a storage was evicted that can not be computed again")
        if call not in self._known:
            self._known.add(call)
            self.calls.append(Rematerialization(call, node, self.scratch(call)))

    def _must_follow(self, node: Node) -> bool:
        if not node.resident:
            return True
        if _stays(node):
            return False
        self.there[node] = None
        return self.deep


def _stays(node: Node) -> bool:
    return node.resident and (node.call is None or node.pinned or node.locks > 0)


def _latest_first(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: -node.serial)
