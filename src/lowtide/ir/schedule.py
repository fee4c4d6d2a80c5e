"""Schedules: the operators to run, in order, and the points at which storages are freed or moved.

Grammar::

    schedule ::= step* "|" step*           forward program | backward program
    step     ::= Compute(op [, into storage]) | Free(storage) | SaveRng(op) | RestoreRng(op)
               | Offload(storage) | Fetch(storage)

A second ``Compute`` of an op is a rematerialization. ``Compute(op, into)`` writes the op's only new storage over the storage
``into``, which the op may overwrite and which is freed before anything else runs; that ``Free`` then releases nothing.
``SaveRng(op)`` keeps the generator state just before the op's first ``Compute``; ``RestoreRng(op)`` makes the op's next
``Compute`` run under that state, after which the generator continues as if nothing had been recomputed.

``Offload(storage)`` begins to copy a storage to the second memory. ``Fetch(storage)`` allocates the storage again after it
was freed and begins to copy it back. Both run asynchronously: a ``Free`` waits until the copy of its storage is complete,
and a step that reads or writes a fetched storage waits until it is back. A copy stays until its last ``Fetch``.
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


@dataclass(frozen=True, slots=True)
class Offload:
    storage: int


@dataclass(frozen=True, slots=True)
class Fetch:
    storage: int


Step = Compute | Free | SaveRng | RestoreRng | Offload | Fetch


@dataclass(frozen=True, slots=True)
class Schedule:
    """``steps[:boundary]`` is the forward program, ``steps[boundary:]`` the backward program."""

    steps: tuple[Step, ...]
    boundary: int

    @property
    def moves(self) -> bool:
        """Whether any storage is offloaded or fetched."""
        return any(isinstance(step, (Offload, Fetch)) for step in self.steps)
