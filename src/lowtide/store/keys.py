"""Keys made from contents: equal only for equal values, and the same in every process."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_DIGITS = 40


def content_key(*parts: Any) -> str:
    """Forty hexadecimal digits for numbers, text, bytes, arrays, ``None``, enums, and tuples, lists, mappings and
    dataclasses of these.

    A part's type counts, so ``1``, ``"1"`` and ``(1,)`` differ; and its length, so different lists of parts cannot
    collide by concatenation. Raises ``TypeError`` for other types, whose printed form may differ between processes.
    """
    digest = hashlib.sha256()
    for part in parts:
        for piece in _pieces(part):
            digest.update(b"%d:" % len(piece))
            digest.update(piece)
    return digest.hexdigest()[:_DIGITS]


def _pieces(part: Any) -> Iterable[bytes]:
    if isinstance(part, enum.Enum):
        yield b"enum " + type(part).__qualname__.encode()
        yield part.name.encode()
    elif part is None or isinstance(part, bool):
        yield repr(part).encode()
    elif isinstance(part, numbers.Integral):
        yield b"int %d" % int(part)
    elif isinstance(part, float):
        yield b"float " + float.__repr__(part).encode()
    elif isinstance(part, str):
        yield b"str " + part.encode("utf-8", "surrogatepass")
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        yield b"dataclass " + type(part).__qualname__.encode()
        yield from _pieces({field.name: getattr(part, field.name) for field in dataclasses.fields(part)})
    elif isinstance(part, Mapping):
        yield b"mapping %d" % len(part)
        for item in part.items():
            yield from _pieces(item)
    elif isinstance(part, (tuple, list)):
        yield b"%s %d" % (b"tuple" if isinstance(part, tuple) else b"list", len(part))
        for item in part:
            yield from _pieces(item)
    else:
        view = memoryview(part)
        yield f"array {view.format}{view.shape}".encode()
        yield view.tobytes()


@functools.cache
def sources_key(*folders: Path) -> str:
    """A key of all Python files below ``folders``: code can change without a new version number."""
    files = [(path, folder) for folder in folders for path in sorted(folder.rglob("*.py"))]
    return content_key(
        [(folder.name, path.relative_to(folder).as_posix(), path.read_bytes()) for path, folder in files]
    )
