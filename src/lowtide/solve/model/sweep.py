"""One reverse sweep over a sequence of computes: its peak and time, unused recomputes dropped. Compiled.

A sequence says everything: a storage is live from each compute of its base to the last use before the next compute of
that base. Walking backwards, a read makes a storage live, a compute of its base ends that; a recompute that finds none
of its storages live is used by nobody and drops out. What a node reads last it may write over.

Sequences are encoded (first computes as the node, recomputes as its complement) and closed by the end node.
"""

from __future__ import annotations

from lowtide.native import core
from lowtide.solve.model.candidate import Candidate
from lowtide.solve.model.compact import CompactGraph, Indices


def sweep(model: CompactGraph, source: Indices) -> Candidate:
    """Peak (without ``fixed_bytes``) and time of an encoded sequence, its unused recomputes left out."""
    return Candidate(*core.sweep(model, source))
