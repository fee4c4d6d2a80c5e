"""A program as a chain of blocks, for the block dynamic programs.

The forward pass is cut at positions ``0 = p_0 < ... < p_L``; block ``i`` owns the forward nodes between two cuts. The
backward nodes are divided in order: the region of block ``i`` begins at the first backward node that reads a storage
which only block ``i`` or an earlier one uses (an *inner* storage), so every block's region lies before those of the
blocks in front of it, and nodes that belong to no block (the gradients' own sums, updates) fall to the region they
stand in.

What crosses a cut is any set of storages, not one: ``C_j`` are the storages of blocks before ``j`` that block ``j`` or
a later one reads, forward or in its region. A long skip, a mask that all blocks read or a shared embedding is thus a
member of many ``C_j``. Since whoever stores ``C_a`` has them already, keeping ``C_j`` too costs only what blocks
``a .. j - 1`` add, so a value read by all blocks is paid once and does not destroy the chain.

Bytes that do not depend on the choices: gradients and other backward storages (``before`` and ``during`` each backward
node), storages that a later region reads once more, and ``constant_bytes``: results handed to the caller and those of
nodes that run once only.

An option of a block is a list of codes: its backward nodes in order with recomputes ``~x`` of its forward nodes between
them. What the option saves from the forward pass follows: whatever the codes read before they recompute it. Its measures
count the storages of the block's own forward nodes; what else is there is in ``before`` and ``during``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Flags, Indices, Numbers
from lowtide.solve.model.structure import last_forward_use, resident_bytes


class BlockSpan(NamedTuple):
    """A block: its forward nodes ``low .. high - 1``, its backward nodes ``first .. last - 1``, and what its options need."""

    low: int
    high: int
    first: int
    last: int
    counted: Flags  # storage
    leaves: Flags  # storage: read by a later block's forward or backward nodes
    late: Flags  # storage: read by a backward node after ``last``
    before: Numbers  # node -> bytes of other storages right before it, in the backward pass
    during: Numbers  # node -> the same while it runs, its results and workspace included


class Measures(NamedTuple):
    """By option. ``saved_bytes`` includes what leaves the block; ``rerun_ns`` is the part of the forward that the option needs
    when nothing is to leave, ``extra_ns`` the recomputes among its codes."""

    saved_bytes: Numbers
    forward_peak_bytes: Numbers
    backward_peak_bytes: Numbers
    rerun_ns: Numbers
    extra_ns: Numbers


def measure_options(model: CompactGraph, span: BlockSpan, options: Sequence[Indices]) -> Measures:
    """Walks the codes of each option, then the block's forward nodes, backwards."""
    return Measures(*core.measure_options(model, span, options).T)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Blocks ``0 .. len(cuts) - 2``; ``starts[i]`` is the first backward node of block ``i``, not increasing."""

    model: CompactGraph
    cuts: tuple[int, ...]
    starts: tuple[int, ...]
    producer: Indices  # storage -> its block; -1 where it does not count
    until: Indices  # storage -> the last block that reads it, forward or in its region
    last_use: Numbers  # storage -> the last node that reads it
    before: Numbers  # node -> bytes
    during: Numbers  # node -> bytes
    constant_bytes: int

    @property
    def blocks(self) -> int:
        return len(self.cuts) - 1

    def region(self, low: int, high: int) -> tuple[int, int]:
        """Backward nodes of blocks ``low .. high - 1``: first, and one after the last."""
        return self.starts[high - 1], self.starts[low - 1] if low else self.model.nodes

    def span(self, low: int, high: int) -> BlockSpan:
        """Blocks ``low .. high - 1`` as one block for the kernels."""
        first, last = self.region(low, high)
        counted, leaves, late = self.producer >= 0, self.until >= high, self.last_use >= last
        return BlockSpan(self.cuts[low], self.cuts[high], first, last, counted, leaves, late, self.before, self.during)

    def crossing_bytes(self) -> Numbers:
        """Row ``a``, column ``j``: bytes of ``C_j`` that blocks ``a .. j - 1`` allocate."""
        blocks = self.blocks
        table = np.zeros((blocks + 1, blocks + 1), np.int64)
        for storage in np.flatnonzero(self.producer >= 0):
            begin, end = int(self.producer[storage]), int(self.until[storage])
            if end > begin:
                table[: begin + 1, begin + 1 : end + 1] += self.model.storage_bytes[storage]
        return table


def make_chain(model: CompactGraph, cuts: Sequence[int], starts: Sequence[int] | None = None) -> Chain:
    """The chain of blocks between ``cuts``, which begin with 0 and end with the first backward node. ``starts``, where
    given, are the regions' beginnings instead of those found; any not increasing line of them is sound, as what a
    region reads of an earlier block crosses to it."""
    counts: Flags = (model.storage_node < model.boundary) & ~model.held & model.recomputable[model.storage_node]
    block_of = np.searchsorted(np.asarray(cuts), model.storage_node, side="right") - 1
    producer = np.where(counts, block_of, -1).astype(np.int32)
    last_forward = (np.searchsorted(cuts, last_forward_use(model), side="right") - 1).astype(np.int32)
    starts = _starts(model, producer, last_forward, len(cuts) - 1) if starts is None else starts
    until, last_use = _uses(model, starts, producer, last_forward)
    before, during = resident_bytes(model, model.storage_node >= model.boundary)
    for storage in np.flatnonzero(counts):
        block = int(producer[storage])
        end = starts[block - 1] if block else model.nodes
        for there in (before, during):
            there[end : last_use[storage] + 1] += model.storage_bytes[storage]
    forward = model.storage_node < model.boundary
    constant = int(model.storage_bytes[forward & ~counts & (model.held | (last_use >= 0))].sum())
    line = tuple(int(cut) for cut in cuts)
    return Chain(model, line, tuple(starts), producer, until, last_use, before, during, constant)


def _backward_reads(model: CompactGraph) -> tuple[Numbers, Numbers]:
    """Storages that backward nodes read, and these nodes, the end of the program included."""
    backward = model.read_node >= model.boundary
    return model.reads[backward].astype(np.int64), model.read_node[backward].astype(np.int64)


def _starts(model: CompactGraph, producer: Indices, last_forward: Indices, blocks: int) -> list[int]:
    storage, node = _backward_reads(model)
    inner = (node < model.nodes) & (producer[storage] >= 0) & (last_forward[storage] <= producer[storage])
    starts = np.full(blocks, model.nodes, np.int64)
    np.minimum.at(starts, producer[storage[inner]], node[inner])
    starts[-1] = model.boundary
    found: list[int] = np.minimum.accumulate(starts).tolist()
    return found


def _uses(
    model: CompactGraph, starts: Sequence[int], producer: Indices, last_forward: Indices
) -> tuple[Indices, Numbers]:
    """The last block and the last node that read each storage, the end of the program included for the latter."""
    storage, node = _backward_reads(model)
    last_use = np.full(len(producer), -1, np.int64)
    np.maximum.at(last_use, storage, node)
    until = np.maximum(last_forward, producer).astype(np.int32)
    inside = (node < model.nodes) & (producer[storage] >= 0)
    block = np.searchsorted(-np.asarray(starts[:-1], np.int64), -node[inside])
    np.maximum.at(until, storage[inside], block.astype(np.int32))
    return until, last_use
