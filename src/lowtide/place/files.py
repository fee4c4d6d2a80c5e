"""Read and write MiniMalloc's CSV: ``id,lower,upper,size`` and, for a placement, ``offset``; lifetimes are half-open."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowtide.errors import PlanError
from lowtide.place.buffers import Buffers, Numbers, check_buffer
from lowtide.place.checker import fault
from lowtide.store import write_atomically

_NEEDED = ("id", "lower", "upper", "size")
_OFFSET = "offset"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


class BufferFile(NamedTuple):
    """The content of a file; ``offsets`` is ``None`` if the file has none."""

    ids: tuple[str, ...]
    buffers: Buffers
    offsets: Numbers | None


def read_buffers(path: str | Path, alignment: int = 1) -> BufferFile:
    """Read the buffers of a file. Raises ``PlanError`` with a message of one line for a file that is not such a CSV, a
    duplicate id, an invalid buffer, and offsets that are not a valid placement."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error
    lines = csv.reader(io.StringIO(text), skipinitialspace=True)
    try:
        columns = _columns(path, next(lines, []))
        rows = [_row(path, lines.line_num, columns, fields) for fields in lines if fields]
    except csv.Error as error:
        raise PlanError(f"{path} is no CSV: {error}.") from error
    ids = tuple(name for name, _ in rows)
    twice = next((name for name in ids if ids.count(name) > 1), None) if len(set(ids)) < len(ids) else None
    if twice is not None:
        raise PlanError(f"{path} has two buffers with the id {twice}.")
    buffers = Buffers.of([(n["lower"], n["upper"], n["size"]) for _, n in rows], alignment)
    if _OFFSET not in columns:
        return BufferFile(ids, buffers, None)
    offsets = np.array([numbers[_OFFSET] for _, numbers in rows], np.int64)
    wrong = fault(buffers, offsets, ids)
    if wrong:
        raise PlanError(f"the offsets in {path} are no placement: {wrong}.")
    return BufferFile(ids, buffers, offsets)


def _columns(path: str | Path, header: Sequence[str]) -> list[str]:
    columns = [name.strip() for name in header]
    expected = f"expected {','.join(_NEEDED)} and, if there is a placement, {_OFFSET}"
    for name in _NEEDED:
        if name not in columns:
            raise PlanError(f"{path} lacks the column {name}; {expected}.")
    for name in columns:
        if name not in (*_NEEDED, _OFFSET) or columns.count(name) > 1:
            raise PlanError(f"{path} has a column {name!r} that is not known or there twice; {expected}.")
    return columns


def _row(path: str | Path, line: int, columns: list[str], fields: list[str]) -> tuple[str, dict[str, int]]:
    where = f"{path}, line {line}"
    if len(fields) != len(columns):
        raise PlanError(f"{where} has {len(fields)} fields, but there are {len(columns)} columns.")
    row = {column: field.strip() for column, field in zip(columns, fields, strict=True)}
    name = row.pop("id")
    for column, text in row.items():
        if not _INTEGER.fullmatch(text):
            raise PlanError(f"{where} (buffer {name}): {column} is {text!r}, not an integer of at most 18 digits.")
    numbers = {column: int(text) for column, text in row.items()}
    check_buffer(f"{where}: buffer {name}", numbers["lower"], numbers["upper"], numbers["size"])
    return name, numbers


def write_buffers(path: str | Path, ids: Sequence[str], buffers: Buffers, offsets: Numbers) -> None:
    """Write a placement atomically. Raises ``PlanError``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow((*_NEEDED, _OFFSET))
    columns = (buffers.lower, buffers.upper, buffers.size, offsets)
    writer.writerows(zip(ids, *(column.tolist() for column in columns), strict=True))
    write_atomically(Path(path), out.getvalue())
