"""What to run, in which order, and when to let go of memory.

Grammar::

    schedule ::= step* "|" step*           forward program | backward program
    step     ::= Compute(op [, into storage]) | Free(storage) | SaveRng(op) | RestoreRng(op)

A second ``Compute`` of an op is a rematerialization. ``Compute(op, into)`` writes the op's one new storage over the storage
``into``, which the op may overwrite and which is freed before anything else runs; that ``Free`` then releases nothing.
``SaveRng(op)`` keeps the generator state just before the op's first ``Compute``; ``RestoreRng(op)`` makes the op's next
``Compute`` run under that state, after which the generator goes on as if nothing had been recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compute:
    op: int
    into: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    storage: int


@dataclass(frozen=True, slots=True)
class SaveRng:
    op: int


@dataclass(frozen=True, slots=True)
class RestoreRng:
    op: int


Step = Compute | Free | SaveRng | RestoreRng


@dataclass(frozen=True, slots=True)
class Schedule:
    """``steps[:boundary]`` is the forward program, ``steps[boundary:]`` the backward program."""

    steps: tuple[Step, ...]
    boundary: int
