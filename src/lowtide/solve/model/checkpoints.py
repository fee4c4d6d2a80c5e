"""From checkpoints to a sequence: what is dropped after the forward pass and computed again when the backward pass asks.

The forward pass runs as written. Forward nodes are *kept* or *dropped*; what runs once only or goes to the caller is
always kept. The checkpoints cut the forward pass into segments. Before the first backward node that reads something
dropped of a segment, all that later backward nodes read of this segment is rebuilt: the wanted nodes and whatever leads
to them from results that are there, in the program's order. The wanted nodes stay until their last backward use; those
of other segments that were only on the way do not. So every segment is rebuilt at most once, on any graph, and no
node is computed again without a reader.

This is how Checkmate turns the checkpoints of its baselines into schedules (Jain et al. 2020, arXiv 1910.02653, section
5 for the least recomputation that given checkpoints ask for, appendix B), except that backward results always stay.
Linear in the graph per set of checkpoints on chains; long skips between segments may be rebuilt once per segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Indices

FIXED, SLOT, WANTED = 1, 2, 4  # why a node's results are there: for good, as a checkpoint, until the last use


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Who reads what, forward nodes only; storages handed to the caller left out.

    ``sources[x]``: nodes whose results forward node ``x`` reads. ``direct[t]``: the same for backward node ``t``,
    counted from the boundary, the end included, latest first. ``last_read[x]``: the last backward node that reads
    ``x``, -1 where there is none. ``done[t]``: nodes that backward node ``t`` is the last to read.
    """

    model: CompactGraph
    sources: list[list[int]]
    direct: list[list[int]]
    last_read: list[int]
    done: list[list[int]]


def make_readers(model: CompactGraph) -> Readers:
    rows = [_sources(model, node) for node in range(model.nodes + 1)]
    direct = [[x for x in reversed(row) if x < model.boundary] for row in rows[model.boundary :]]
    last_read = [-1] * model.boundary
    for step, nodes in enumerate(direct):
        for node in nodes:
            last_read[node] = step
    done: list[list[int]] = [[] for _ in direct]
    for node, step in enumerate(last_read):
        if step >= 0:
            done[step].append(node)
    return Readers(model, rows[: model.boundary], direct, last_read, done)


def _sources(model: CompactGraph, node: int) -> list[int]:
    storages = model.reads_of(node)
    return sorted({int(model.storage_node[s]) for s in storages if not model.held[s]})


class LiveResults:
    """Which forward nodes' results are there while the backward pass goes on; ``codes`` is the sequence so far."""

    def __init__(self, readers: Readers, kept: Iterable[int]) -> None:
        model = readers.model
        self.readers = readers
        self.there = bytearray(0 if model.recomputable[node] else FIXED for node in range(model.boundary))
        for node in kept:
            self.there[node] = FIXED
        self.codes = list(range(model.boundary))

    def rebuild(self, targets: Iterable[int]) -> list[int]:
        """Compute the targets that are not there, with what leads to them; returns what was computed."""
        missing: set[int] = set()
        pending = [node for node in targets if not self.there[node]]
        while pending:
            node = pending.pop()
            if node not in missing:
                missing.add(node)
                pending.extend(source for source in self.readers.sources[node] if not self.there[source])
        computed = sorted(missing)
        self.codes.extend(~node for node in computed)
        return computed

    def want(self, targets: Iterable[int], step: int) -> None:
        """The targets stay until their last backward use."""
        for node in targets:
            if self.readers.last_read[node] >= step:
                self.there[node] |= WANTED

    def compute(self, step: int) -> None:
        """The backward node runs; what it was the last to read goes."""
        self.codes.append(self.readers.model.boundary + step)
        for node in self.readers.done[step]:
            self.there[node] &= ~WANTED

    def renew(self, segment: int, nodes: range, step: int) -> list[int]:
        """Rebuild what is read of the segment from ``step`` on; returns what was computed."""
        targets = [node for node in nodes if self.readers.last_read[node] >= step]
        computed = self.rebuild(targets)
        self.want(targets, step)
        return computed

    def backward(self, cuts: Sequence[int]) -> Indices:
        """The encoded sequence, once the backward pass has run: segments between the cuts are renewed where they are read."""
        boundary = self.readers.model.boundary
        segment_of = np.searchsorted(cuts, np.arange(boundary), side="right").tolist()
        edges = [0, *cuts, boundary]
        for step, nodes in enumerate(self.readers.direct):
            for node in nodes:
                if not self.there[node]:
                    segment = segment_of[node]
                    self.renew(segment, range(edges[segment], edges[segment + 1]), step)
            self.compute(step)
        return np.array(self.codes, np.int32)


def kept_sequence(readers: Readers, checkpoints: Iterable[int]) -> Indices:
    """The encoded sequence in which the checkpoints and what follows the last of them are kept, the rest dropped.

    Without checkpoints everything is kept.
    """
    cuts = sorted(set(checkpoints))
    last = cuts[-1] if cuts else 0
    return LiveResults(readers, [*cuts, *range(last, readers.model.boundary)]).backward(cuts)


def nothing_kept_sequence(readers: Readers) -> Indices:
    """The encoded sequence in which only the last forward node is kept and every backward node rebuilds what it reads,
    for itself alone; of the square of the program's length."""
    memory = LiveResults(readers, [readers.model.boundary - 1] if readers.model.boundary else [])
    for step, nodes in enumerate(readers.direct):
        memory.rebuild(nodes)
        memory.compute(step)
    return np.array(memory.codes, np.int32)
