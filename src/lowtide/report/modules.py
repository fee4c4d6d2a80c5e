"""What a plan saves and recomputes, module by module."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.ir import Compute, Costs, Graph, Schedule, live_at_boundary
from lowtide.units import format_bytes, format_time

_INDEX = re.compile(r"(.*?\.)?(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One block of the model.

    ``saved_bytes``: its storages that are live at the forward/backward boundary. ``recomputed_ops`` counts the second
    and further computes of its ops, views left out; ``recomputed_ns`` is their time, ``time_ns`` that of its ops once.
    """

    name: str
    saved_bytes: int
    recomputed_ops: int
    recomputed_ns: int
    time_ns: int

    def cells(self) -> tuple[str, str, str, str, str]:
        """A row of a table: name, bytes saved, ops recomputed, the time that takes, time once."""
        again = (str(self.recomputed_ops), format_time(self.recomputed_ns)) if self.recomputed_ops else ("-", "-")
        return self.name or "(model)", format_bytes(self.saved_bytes), *again, format_time(self.time_ns)


def module_rows(graph: Graph, costs: Costs, schedule: Schedule) -> list[ModuleRow]:
    """A row per block (a module path up to its first index), in the order in which the program meets them."""
    block = [block_of(op.module) for op in graph.ops]
    computes = Counter(step.op for step in schedule.steps if isinstance(step, Compute))
    allocating = {storage.base for storage in graph.storages}
    saved: Counter[str] = Counter()
    ops: Counter[str] = Counter()
    again: Counter[str] = Counter()
    once: Counter[str] = Counter()
    for storage in live_at_boundary(graph, schedule):
        base = graph.storages[storage].base
        if base is not None:
            saved[block[base]] += int(costs.storage_bytes[storage])
    for op in graph.ops:
        repeats = max(computes[op.id] - 1, 0)
        ops[block[op.id]] += repeats if op.id in allocating else 0
        again[block[op.id]] += repeats * int(costs.time_ns[op.id])
        once[block[op.id]] += int(costs.time_ns[op.id])
    return [ModuleRow(name, saved[name], ops[name], again[name], once[name]) for name in dict.fromkeys(block)]


def block_of(module: str) -> str:
    """``block_of("transformer.h.0.mlp.act") == "transformer.h.0"``; a path without an index stays as it is."""
    match = _INDEX.match(module)
    return match[0] if match else module


def merge_repeats(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    """Neighbouring blocks that differ in their index only, and are treated alike, as one row with the sum of times."""
    merged = []
    for _, group in itertools.groupby(
        rows, key=lambda row: (_without_index(row.name), row.saved_bytes, row.recomputed_ops)
    ):
        same = list(group)
        merged.append(same[0] if len(same) == 1 else _merge(same))
    return merged


def _without_index(name: str) -> str:
    stem, dot, index = name.rpartition(".")
    return stem + dot if index.isdigit() else name


def _merge(rows: list[ModuleRow]) -> ModuleRow:
    first, last = rows[0].name, rows[-1].name
    return ModuleRow(
        f"{first}-{last.rpartition('.')[2]} (each)",
        rows[0].saved_bytes,
        rows[0].recomputed_ops,
        sum(row.recomputed_ns for row in rows) // len(rows),
        sum(row.time_ns for row in rows) // len(rows),
    )
