"""Writes an online run as a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lowtide.dynamic.node import Node
from lowtide.dynamic.operators import Operator
from lowtide.trace import TraceWriter


class Recorder(TraceWriter):
    """Writes calls, releases of storages, and constants when they are first read or written."""

    def __init__(self, path: str | Path, device: str, budget_bytes: int) -> None:
        super().__init__(path, name=Path(path).stem, device=device, budget_bytes=budget_bytes)
        self.known: set[int] = set()  # numbers of storages that are in the trace

    def operator(
        self, operator: Operator, reads: Iterable[Node], made: Sequence[Node], written: Sequence[Node], cost_ns: int
    ) -> None:
        for node in (*reads, *written):
            if node.number not in self.known:
                self.known.add(node.number)
                self.constant(node.number, node.size_bytes)
        self.known.update(node.number for node in made)
        self.call(
            operator.name,
            cost_ns,
            [node.number for node in reads],
            [(node.number, node.size_bytes) for node in made],
            writes=[node.number for node in written],
            random=operator.random,
            once=operator.once,
        )

    def released(self, node: Node) -> None:
        """Record that the program released the node's storage."""
        if node.number in self.known:
            self.release(node.number)
