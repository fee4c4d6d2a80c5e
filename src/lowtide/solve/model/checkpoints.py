"""Turn a set of checkpoints into a compute sequence, in which dropped forward results are recomputed in the backward pass.

The forward pass runs as written. Forward nodes are *kept* or *dropped*; nodes that run only once and storages handed to the
caller are always kept. The checkpoints cut the forward pass into segments. Before the first backward node that reads a
dropped result of a segment, all results of this segment that later backward nodes read are recomputed, with the nodes that
lead to them from live results, in the program's order. These results stay until their last backward use; results of other
segments that were only needed on the way do not. So every segment is recomputed at most once, on any graph, and no node is
recomputed without a reader.

This is how Checkmate turns the checkpoints of its baselines into schedules (Jain et al. 2020, arXiv 1910.02653; section 5
for the least recomputation for given checkpoints, and appendix B), except that backward results always stay.
Linear in the graph per set of checkpoints on chains; long skips between segments may be recomputed once per segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Indices

FIXED, SLOT, WANTED = 1, 2, 4  # why a node's results are live: for good, in a slot, until the last use


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """The readers of forward nodes, without storages handed to the caller.

    ``sources[x]``: forward nodes whose results forward node ``x`` reads. ``direct[t]``: forward nodes whose results backward
    node ``t`` reads, latest first; ``t`` counts from the boundary, the end included. ``last_read[x]``: the last backward node
    that reads ``x``, -1 if there is none. ``done[t]``: forward nodes of which backward node ``t`` is the last reader.
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
    """Tracks which forward nodes' results are live during the backward pass; ``codes`` is the sequence so far."""

    def __init__(self, readers: Readers, kept: Iterable[int]) -> None:
        model = readers.model
        self.readers = readers
        self.there = bytearray(0 if model.recomputable[node] else FIXED for node in range(model.boundary))
        for node in kept:
            self.there[node] = FIXED
        self.codes = list(range(model.boundary))

    def rebuild(self, targets: Iterable[int]) -> list[int]:
        """Recompute the targets that are not live, with the nodes that lead to them. Returns the recomputed nodes."""
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
        """Keep the targets until their last backward use."""
        for node in targets:
            if self.readers.last_read[node] >= step:
                self.there[node] |= WANTED

    def compute(self, step: int) -> None:
        """Run a backward node and drop the results of which it was the last reader."""
        self.codes.append(self.readers.model.boundary + step)
        for node in self.readers.done[step]:
            self.there[node] &= ~WANTED

    def renew(self, segment: int, nodes: range, step: int) -> list[int]:
        """Recompute and keep all results of the segment that are read from ``step`` on. Returns the recomputed nodes."""
        targets = [node for node in nodes if self.readers.last_read[node] >= step]
        computed = self.rebuild(targets)
        self.want(targets, step)
        return computed

    def backward(self, cuts: Sequence[int]) -> Indices:
        """Run the backward pass, renewing each segment between the cuts when it is read. Returns the encoded sequence."""
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
    """Return the encoded sequence that keeps the checkpoints and all nodes after the last one, and drops the rest.

    Without checkpoints everything is kept.
    """
    cuts = sorted(set(checkpoints))
    last = cuts[-1] if cuts else 0
    return LiveResults(readers, [*cuts, *range(last, readers.model.boundary)]).backward(cuts)


def nothing_kept_sequence(readers: Readers) -> Indices:
    """Return the encoded sequence that keeps only the last forward node; every backward node recomputes its inputs for itself
    alone. Its length is quadratic in the program's."""
    memory = LiveResults(readers, [readers.model.boundary - 1] if readers.model.boundary else [])
    for step, nodes in enumerate(readers.direct):
        memory.rebuild(nodes)
        memory.compute(step)
    return np.array(memory.codes, np.int32)
