"""Encoded sequences with recomputes, and what the sweep says of them."""

from __future__ import annotations

import random

import numpy as np

from lowtide.solve.model.compact import CompactGraph, Indices, encode_keep_all
from lowtide.solve.model.sweep import Candidate, sweep


def measure(model: CompactGraph, codes: Indices) -> tuple[Indices, Candidate]:
    swept = sweep(model, codes)
    return swept.codes, swept


def with_recomputes(model: CompactGraph, seed: int) -> Indices:
    """The program with recomputes of random nodes at random places."""
    draw = random.Random(seed)
    codes: list[int] = []
    for node in encode_keep_all(model).tolist():
        earlier = [n for n in range(node) if model.recomputable[n]]
        codes.extend(~draw.choice(earlier) for _ in range(draw.randint(0, 2)) if earlier)
        codes.append(node)
    return np.array(codes, np.int32)
