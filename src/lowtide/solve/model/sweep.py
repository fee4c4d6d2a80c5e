"""One reverse sweep over a sequence of computes: its peak and time, unused recomputes dropped. Compiled.

A sequence says everything: a storage is live from each compute of its base to the last use before the next compute of
that base. Walking backwards, a read makes a storage live, a compute of its base ends that; a recompute that finds none
of its storages live is used by nobody and drops out. What a node reads last it may write over.

Sequences are encoded (first computes as the node, recomputes as its complement) and closed by the end node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Indices


class Candidate(NamedTuple):
    """An encoded sequence and what the compact graph says of it; ``recompute_ns`` counts recomputes and all views."""

    codes: Indices
    recompute_ns: int
    peak_bytes: int


def quickest(candidates: Iterable[Candidate], count: int | None = None) -> list[Candidate]:
    """The quickest first, of equals the lowest; at most ``count``."""
    return sorted(candidates, key=lambda candidate: (candidate.recompute_ns, candidate.peak_bytes))[:count]


def lowest(candidates: Iterable[Candidate]) -> Candidate:
    """The one with the lowest peak, of equals the quickest."""
    return min(candidates, key=lambda candidate: (candidate.peak_bytes, candidate.recompute_ns))


def sweep(model: CompactGraph, source: Indices) -> Candidate:
    """Peak (without ``fixed_bytes``) and time of an encoded sequence, its unused recomputes left out."""
    return Candidate(*core.sweep(model, source))
