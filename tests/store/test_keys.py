"""Keys: equal for equal contents only, in every process."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lowtide.store import content_key, sources_key


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int = 0


@dataclasses.dataclass(frozen=True)
class Pair:
    x: int
    y: int = 0


DISTINCT = [
    (), (None,), (True,), (False,), (1,), (0,), (1.0,), ("1",), (b"1",), ((1,),), ([1],), (1, 2), ((1, 2),), ((1,), 2),
    ("ab", "c"), ("a", "bc"), ("a", "b"), ("astr b",),
    ("abc",), ("",), ("", ""), ({"a": 1},), ((("a", 1),),), ({"a": 1, "b": 2},), (-0.0,), (0.0,),
    (float("nan"),), (Colour.RED,), (Colour.BLUE,), (Point(1),), (Point(0, 1),), (Pair(1),),
    (np.array([1, 2]),), (np.array([1.0, 2.0]),), (np.array([[1, 2]]),), (np.array([1, 2], np.int32),), ("int 1",), ("\ud800",),
]  # fmt: skip


def test_distinct_parts_have_distinct_keys() -> None:
    keys = [content_key(*parts) for parts in DISTINCT]
    for (one, a), (other, b) in itertools.combinations(zip(DISTINCT, keys, strict=True), 2):
        assert a != b, (one, other)


def test_equal_parts_have_equal_keys() -> None:
    assert content_key(np.int64(5), np.array([1, 2])) == content_key(5, np.array([1, 2]))
    assert content_key(np.array([[1, 2], [3, 4]]).T) == content_key(np.array([[1, 3], [2, 4]]))


def test_what_prints_otherwise_elsewhere_is_refused() -> None:
    for part in (object(), {1, 2}, len):
        with pytest.raises(TypeError):
            content_key(part)


def test_keys_are_those_of_another_process() -> None:
    code = "from lowtide.store import content_key; print(content_key('a', 1, (2.5, None), {'b': b'c'}))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == content_key("a", 1, (2.5, None), {"b": b"c"})


def test_sources_count_by_name_and_content(tmp_path: Path) -> None:
    keys = set()
    for turn, (name, text) in enumerate([("a.py", "1"), ("a.py", "2"), ("b.py", "2"), ("a.txt", "2")]):
        folder = tmp_path / str(turn) / "package"
        folder.mkdir(parents=True)
        (folder / name).write_text(text)
        keys.add(sources_key(folder))
    assert len(keys) == 4
