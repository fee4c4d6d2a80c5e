"""What a run saves and recomputes, by module, or by operator if modules are not known."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.ir import Kind
from lowtide.report.profile import Span, StepProfile
from lowtide.units import format_bytes, format_time

_INDEX = re.compile(r"(.*?\.)?(\d+)(?=\.|$)")
_LAST = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One block of the model, or one kind of operator.

    ``saved_bytes``: its tensors that are live between the passes. ``recomputed_ops`` counts the second and later runs
    of its operators, and ``recomputed_ns`` is their time. ``time_ns`` is the time of its operators, each run once.
    """

    name: str
    saved_bytes: int
    recomputed_ops: int
    recomputed_ns: int
    time_ns: int

    def cells(self) -> tuple[str, str, str, str, str]:
        """A row of the table: name, bytes saved, operators recomputed, their time, time without recomputation."""
        again = (str(self.recomputed_ops), format_time(self.recomputed_ns)) if self.recomputed_ops else ("-", "-")
        return self.name or "(model)", format_bytes(self.saved_bytes), *again, format_time(self.time_ns)


def rows_of(run: StepProfile, program: Iterable[tuple[str, int]], unit: str) -> list[ModuleRow]:
    """A row per ``unit``, in the order of ``program``: the module or the name of each operator, and its time.

    By ``module``: one row per block; recomputed views are not counted. By ``operator``: one row per name.
    """

    def owner(span: Span) -> str:
        return block_of(span.module) if unit == "module" else span.target

    allocating = {block.first for block in run.blocks if block.kind in (Kind.TENSOR, Kind.SECOND_COPY)}
    saved, ops, again_ns, once_ns = (Counter[str]() for _ in range(4))
    for block in run.blocks:
        if block.span is not None and block.kind is Kind.TENSOR and block.first < run.boundary <= block.last:
            saved[owner(block.span)] += block.bytes
    for index, span in enumerate(run.spans):
        if span.again:
            ops[owner(span)] += unit == "operator" or index in allocating
            again_ns[owner(span)] += span.time_ns
    for name, time_ns in program:
        once_ns[block_of(name) if unit == "module" else name] += time_ns
    return [ModuleRow(name, saved[name], ops[name], again_ns[name], ns) for name, ns in once_ns.items()]


def block_of(module: str) -> str:
    """``block_of("transformer.h.0.mlp.act") == "transformer.h.0"``; a path without an index is unchanged."""
    match = _INDEX.match(module)
    return match[0] if match else module


def merge_repeats(rows: Iterable[ModuleRow]) -> list[ModuleRow]:
    """Merge neighbouring blocks that differ only in their index and are treated alike; times are means."""
    merged = []
    for _, group in itertools.groupby(
        rows, lambda row: (_LAST.sub(r"\1", row.name), row.saved_bytes, row.recomputed_ops)
    ):
        same = list(group)
        row = same[0]
        if len(same) > 1:
            row = dataclasses.replace(
                row,
                name=f"{row.name}-{same[-1].name.rpartition('.')[2]} (each)",
                recomputed_ns=sum(each.recomputed_ns for each in same) // len(same),
                time_ns=sum(each.time_ns for each in same) // len(same),
            )
        merged.append(row)
    return merged
