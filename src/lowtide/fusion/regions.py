"""Decide which operators are computed together in one kernel.

A storage is *kept* (written to memory) if one of these holds: a non-fusible operator reads it; the caller gets it; its
recomputation in each reader would read more than it holds; or its reader comes so much later that the inputs, which
would have to stay instead, are larger. All other fusible operators are absorbed by the kernels of their readers. So
every kept storage has one kernel that computes it from kept storages, and planners decide about kept storages only.

There are two steps. ``_transparent``, forward: from what an operator's result could be computed, looking through
pointwise operators. ``_anchors``, backward: the kept operators whose kernels an operator belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.fusion.kinds import ALONE, Kind, kinds, operator_name
from lowtide.ir import Op
from lowtide.program.layouts import memory_order
from lowtide.program.program import Program

_LONGEST = 48  # most operators to recompute in a reader
_NEAR = 8  # calls by which a kernel may prolong the life of what it reads
_FUSIBLE = (Kind.POINTWISE, Kind.GATHER, Kind.REDUCTION)


@dataclass(frozen=True, slots=True)
class Region:
    """Ops that one kernel computes, views included, in program order. ``anchor``: the op whose results are kept; the
    kernel runs in its place. ``roots``: the values that the kernel reads."""

    members: tuple[int, ...]
    anchor: int
    roots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageReaders:
    """A program by storages. ``readers[storage]``: the ops, except views, that read it."""

    program: Program
    kinds: list[Kind]
    readers: list[list[int]]
    owned: tuple[tuple[int, ...], ...]  # per op, storages that it allocates
    handed: frozenset[int]  # storages that the caller receives

    def storage(self, value: int) -> int:
        return self.program.graph.values[value].storage

    def nbytes(self, storage: int) -> int:
        return max(self.program.metas[value].storage_bytes for value in self.program.graph.storages[storage].values)

    def fusible(self, op: int) -> bool:
        return self.kinds[op] in _FUSIBLE


def read_program(program: Program, apart: frozenset[int] = frozenset()) -> StorageReaders:
    """Collect the readers of each storage. ``apart``: ops that must not be part of a kernel."""
    graph = program.graph
    found = [Kind.CALL if i in apart and kind in _FUSIBLE else kind for i, kind in enumerate(kinds(program))]
    readers: list[list[int]] = [[] for _ in graph.storages]
    for op in graph.ops:
        if found[op.id] is not Kind.VIEW:
            for storage in dict.fromkeys(graph.values[value].storage for value in op.inputs):
                readers[storage].append(op.id)
    handed = frozenset(graph.values[value].storage for value in (*graph.outputs, *graph.forward_outputs))
    return StorageReaders(program, found, readers, graph.owned, handed)


def find_regions(reading: StorageReaders) -> list[Region]:
    """One region per anchor, in program order, if a kernel is better than the operators: for several operators, or one
    of ``ALONE``."""
    anchors = _anchors(reading, _transparent(reading))
    kept = {op for op, belongs in anchors.items() if op in belongs}
    regions = [_region(reading, op, kept) for op in sorted(kept)]
    return [
        region
        for region in regions
        if sum(reading.kinds[op] is not Kind.VIEW for op in region.members) > 1
        or operator_name(reading.program.calls[region.anchor].target) in ALONE
    ]


def _transparent(reading: StorageReaders) -> set[int]:
    """Ops that may be recomputed in every reader, because this reads no more bytes than reading their result."""
    # For storages that are looked through: what they are computed from, and the number of ops.
    looked_through: dict[int, tuple[frozenset[int], int]] = {}
    found = set()
    for op in reading.program.graph.ops:
        owned = reading.owned[op.id]
        if reading.kinds[op.id] is not Kind.POINTWISE or not owned or _rearranges(reading, op):
            continue
        inputs = {reading.storage(value) for value in op.inputs}
        behind = [looked_through.get(storage, (frozenset((storage,)), 0)) for storage in inputs]
        reads = frozenset[int]().union(*(sources for sources, _ in behind))
        length = 1 + sum(count for _, count in behind)
        size = sum(map(reading.nbytes, owned))
        if length <= _LONGEST and sum(map(reading.nbytes, reads)) <= size + size // 8:
            found.add(op.id)
            if not any(_must_keep(reading, storage) for storage in owned):
                looked_through.update(dict.fromkeys(owned, (reads, length)))
    return found


def _rearranges(reading: StorageReaders, op: Op) -> bool:
    """Whether the op copies a tensor into another dimension order. Such reads are slow, so one copy serves all
    readers."""
    if operator_name(reading.program.calls[op.id].target) not in ("clone", "_to_copy", "copy"):
        return False
    source, result = (reading.program.metas[value] for value in (op.inputs[-1], op.outputs[0]))
    dims = {dim for dim, size in enumerate(source.shape) if size > 1 and source.stride[dim] != 0}
    read, written = ([dim for dim in memory_order(meta.shape, meta.stride) if dim in dims] for meta in (source, result))
    return read != written


def _must_keep(reading: StorageReaders, storage: int) -> bool:
    return storage in reading.handed or not all(map(reading.fusible, reading.readers[storage]))


def _anchors(reading: StorageReaders, transparent: set[int]) -> dict[int, frozenset[int]]:
    """For each fusible op, the kept ops whose kernels it is part of; itself if its result is kept."""
    graph = reading.program.graph
    calls = list(itertools.accumulate(kind is Kind.CALL for kind in reading.kinds))
    found: dict[int, frozenset[int]] = {}
    for op in reversed(graph.ops):
        if not reading.fusible(op.id):
            continue
        owned = reading.owned[op.id]
        found[op.id] = frozenset((op.id,))
        readers = {reader for storage in owned for reader in reading.readers[storage]}
        if any(_must_keep(reading, storage) for storage in owned) or not readers:
            continue
        belongs = frozenset[int]().union(*(found[reader] for reader in readers))
        same_phase = all(graph.ops[anchor].phase is op.phase for anchor in belongs)
        alone = len(belongs) == 1 and same_phase and not _apart(reading, op, belongs)
        if op.id in transparent or (alone and not _waits(reading, calls, op.id, min(belongs))):
            found[op.id] = belongs
    return found


def _apart(reading: StorageReaders, op: Op, anchors: Iterable[int]) -> bool:
    """Whether kernels of ``anchors`` should read the result from memory, because inside them the reads of ``op`` would
    be scattered."""
    passes = any(reading.kinds[anchor] is Kind.REDUCTION for anchor in anchors)
    return reading.kinds[op.id] is Kind.GATHER or (passes and _rearranges(reading, op))


def _waits(reading: StorageReaders, calls: Sequence[int], op: int, anchor: int) -> bool:
    """Whether ``op`` in the kernel of ``anchor`` keeps more bytes alive, for long, than its result holds."""
    graph = reading.program.graph
    read = {reading.storage(value) for value in graph.ops[op].inputs}
    inside = (s for s in read - reading.handed if not graph.storages[s].external)
    waiting = [s for s in inside if calls[anchor] - calls[max(reading.readers[s])] > _NEAR]
    return sum(map(reading.nbytes, waiting)) > sum(map(reading.nbytes, reading.owned[op]))


def _region(reading: StorageReaders, anchor: int, kept: set[int]) -> Region:
    """The ops from which ``anchor`` is computed, back to kept storages and non-fusible ops."""
    graph = reading.program.graph
    members, roots = {anchor}, dict[int, None]()
    pending = list(reversed(graph.ops[anchor].inputs))
    while pending:
        value = pending.pop()
        op = graph.values[value].producer
        if op is None or op in kept or not (reading.fusible(op) or reading.kinds[op] is Kind.VIEW):
            roots[value] = None
        elif op not in members:
            members.add(op)
            pending.extend(reversed(graph.ops[op].inputs))
    return Region(tuple(sorted(members)), anchor, tuple(roots))
