"""Sequences of computes with their measures, and the order in which they are preferred."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowtide.solve.model.compact import Indices


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
