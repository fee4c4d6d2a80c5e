"""Ragged tables: the entries of row ``i`` are ``entries[start[i]:start[i + 1]]``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_Indices = npt.NDArray[np.int32]


def ragged(rows: Sequence[Sequence[int]]) -> tuple[_Indices, _Indices]:
    """Return ``start`` and ``entries`` for the rows."""
    start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([entry for row in rows for entry in row], np.int32)


def rows(start: _Indices, entries: _Indices) -> list[list[int]]:
    """Return every row as a list: the inverse of ``ragged``."""
    return [entries[a:b].tolist() for a, b in itertools.pairwise(start.tolist())]


def inverse(start: _Indices, entries: _Indices, columns: int) -> tuple[_Indices, _Indices]:
    """Return the ragged table of entry -> rows, rows ascending."""
    rows = np.repeat(np.arange(len(start) - 1, dtype=np.int32), np.diff(start))
    order = np.argsort(entries, kind="stable")
    begin = np.zeros(columns + 1, np.int32)
    np.cumsum(np.bincount(entries, minlength=columns), out=begin[1:])
    return begin, rows[order]


def owners(start: _Indices, entries: _Indices, columns: int) -> _Indices:
    """Map every entry to the only row that contains it, -1 if none does."""
    owner = np.full(columns, -1, np.int32)
    owner[entries] = np.repeat(np.arange(len(start) - 1, dtype=np.int32), np.diff(start))
    return owner
