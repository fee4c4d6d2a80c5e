"""Measure a compute sequence with one reverse sweep: its peak and time, unused recomputes dropped. Compiled.

The sequence determines liveness: a storage is live from each compute of its base to the last use before the next compute of
that base. Going backwards, a read makes a storage live, and a compute of its base ends its life; a recompute of which no
storage is live is unused and dropped. A node may overwrite storages of which it is the last reader.

Sequences are encoded (first computes as the node, recomputes as its complement) and end with the end node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices


class Candidate(NamedTuple):
    """An encoded sequence with its figures on the compact graph; ``recompute_ns`` counts recomputes and all views."""

    codes: Indices
    recompute_ns: int
    peak_bytes: int


def quickest(candidates: Iterable[Candidate], count: int | None = None) -> list[Candidate]:
    """Return at most ``count`` candidates, the quickest first, of equals the lowest."""
    return sorted(candidates, key=lambda candidate: (candidate.recompute_ns, candidate.peak_bytes))[:count]


def lowest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the candidate with the lowest peak, of equals the quickest."""
    return min(candidates, key=lambda candidate: (candidate.peak_bytes, candidate.recompute_ns))


def sweep(model: CompactGraph, source: Indices) -> Candidate:
    """Return an encoded sequence without its unused recomputes, with its peak (without ``fixed_bytes``) and time."""
    return Candidate(*core.sweep(model, source))
