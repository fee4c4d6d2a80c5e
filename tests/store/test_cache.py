"""The store: whatever is on disk, and whatever the disk does, is an entry or none, never an error."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from lowtide.errors import PlanError
from lowtide.store import Cache, cache_folder, write_atomically
from lowtide.store.files import LEFTOVER_SECONDS, mark_used
from tests.store.disks import full_disk
from tests.store.entries import signed

FORMAT = "tests/1"
Size = Annotated[int, msgspec.Meta(ge=0, le=1000)]


class Row(msgspec.Struct, frozen=True):
    name: str
    sizes: tuple[Size, ...]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


ROW = Row("row", (1, 2, 3), 0.5)
decode = msgspec.json.Decoder(Row).decode


def _cache(folder: Path, most: int = 10) -> Cache:
    return Cache(folder, FORMAT, most)


def test_round_trip(tmp_path: Path) -> None:
    cache = _cache(tmp_path / "new" / "folder")
    assert cache.get("a", decode) is None
    assert cache.put("a", ROW)
    assert cache.get("a", decode) == ROW
    assert cache.get("b", decode) is None
    assert [path.name for path in cache.folder.iterdir()] == ["a.json"]


def _flipped(content: bytes, source: random.Random) -> bytes:
    position = source.randrange(len(content))
    return content[:position] + bytes([content[position] ^ (1 << source.randrange(8))]) + content[position + 1 :]


def test_damaged_files_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every truncation, and hundreds of flipped bits: each read is a miss with one line in the log that names the file."""
    cache = _cache(tmp_path)
    cache.put("a", ROW)
    path = cache.path("a")
    content = path.read_bytes()
    source = random.Random(0)
    damaged = [content[:size] for size in range(len(content))] + [_flipped(content, source) for _ in range(300)]
    for text in damaged:
        caplog.clear()
        path.write_bytes(text)
        assert cache.get("a", decode) is None, text
        (record,) = caplog.records
        assert str(path) in record.getMessage()
    cache.put("a", ROW)
    assert cache.get("a", decode) == ROW


_ODD: list[Any] = [
    None, True, -1, 1001, 1e30, 10**400, -(10**400), 2.5, math.inf, -math.inf, math.nan, "", "1", [], {}, [[]], [None],
]  # fmt: skip


def _valid(document: Any) -> bool:
    """By hand, what ``Row`` says."""
    if not isinstance(document, dict) or not {"name", "sizes", "seconds"} <= set(document):
        return False
    name, sizes, seconds = document["name"], document["sizes"], document["seconds"]
    return (
        isinstance(name, str)
        and isinstance(sizes, (list, tuple))
        and all(type(size) is int and 0 <= size <= 1000 for size in sizes)
        and type(seconds) in (int, float)
        and 0 <= seconds <= 1e6
    )


def test_odd_values_under_valid_digests_are_misses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = _cache(tmp_path)
    documents = [*_ODD]
    for key in ("name", "sizes", "seconds"):
        documents += [msgspec.to_builtins(ROW) | {key: value} for value in _ODD]
        documents += [{name: value for name, value in msgspec.to_builtins(ROW).items() if name != key}]
    documents += [msgspec.to_builtins(ROW) | {"sizes": [1, value]} for value in _ODD]
    found = []
    for document in documents:
        caplog.clear()
        cache.path("a").write_text(signed(FORMAT, document))
        found.append(cache.get("a", decode) is not None)
        assert len(caplog.records) == (not found[-1])
    assert found == [_valid(document) for document in documents]
    assert any(found)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.mkdir(),
        lambda path: os.mkfifo(path),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    ],
)
def test_what_is_not_a_file_is_a_miss(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder, a pipe that nobody writes to, a circle of links, a device without end, a terabyte of nothing."""
    cache = _cache(tmp_path)
    damage(cache.path("a"))
    assert cache.get("a", decode) is None
    assert len(caplog.records) == 1
    if cache.path("a").exists() and not cache.path("a").is_file():
        assert not cache.put("a", ROW)
        assert len(caplog.records) == 2


def test_a_file_that_may_not_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = _cache(tmp_path)
    cache.put("a", ROW)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert cache.get("a", decode) is None
    assert "Permission denied" in caplog.text


def test_a_full_disk_is_said_once_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = _cache(tmp_path / "disk")
    document = {"name": "x" * 100_000}
    with full_disk(cache.folder):
        assert not cache.put("a", document)
        assert cache.get("a", decode) is None
        assert cache.get_or_make("b", decode, lambda: ROW, lambda row: document, patience_seconds=60) == ROW
        left = [path.suffix for path in cache.folder.iterdir()]
        with pytest.raises(PlanError, match="cannot write"):
            write_atomically(cache.folder / "plan.json", "x" * 100_000)
    assert not {".tmp", ".json", ".lock"}.intersection(left)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all(str(cache.folder) in record.getMessage() for record in caplog.records)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = _cache(tmp_path / "file" / "below")
    assert not cache.put("a", ROW)
    assert cache.get_or_make("a", decode, lambda: ROW, msgspec.to_builtins, patience_seconds=60) == ROW
    assert "cannot be kept" in caplog.text


def test_the_entries_used_last_stay(tmp_path: Path) -> None:
    cache = _cache(tmp_path, most=3)
    for age, key in enumerate("abc"):
        cache.put(key, ROW)
        os.utime(cache.path(key), (age, age))
    assert cache.get("a", decode) == ROW
    cache.put("d", ROW)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_a_file_that_is_used_does_not_look_written(tmp_path: Path) -> None:
    """Whatever the file system notes of reads by itself."""
    path = tmp_path / "entry.json"
    path.write_text("{}")
    os.utime(path, (1000, 2000))
    mark_used(path)
    assert path.stat().st_mtime == 2000
    assert path.stat().st_atime > time.time() - 3600
    mark_used(tmp_path / "gone.json")


def test_leftovers_of_killed_processes_are_swept(tmp_path: Path) -> None:
    """Not those of an hour, which somebody may be writing, and nothing that is not ours."""
    cache = _cache(tmp_path)
    old = time.time() - LEFTOVER_SECONDS - 60
    for name in ("old.tmp", "old.lock", "old.txt", "new.tmp", "new.lock"):
        (tmp_path / name).touch()
        if name.startswith("old"):
            os.utime(tmp_path / name, (old, old))
    cache.put("a", ROW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "new.lock", "new.tmp", "old.txt"]


def test_the_folder_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "~nobody-of-this-name/cache")
    assert cache_folder().name == "cache"
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    assert cache_folder().name == "lowtide"


def test_entries_are_json_with_a_format(tmp_path: Path) -> None:
    cache = _cache(tmp_path)
    cache.put("a", ROW)
    data = json.loads(cache.path("a").read_text())
    assert (data["format"], data["entry"]) == (FORMAT, {"name": "row", "sizes": [1, 2, 3], "seconds": 0.5})


def test_entries_go_once_there_are_an_eighth_too_many(tmp_path: Path) -> None:
    cache = _cache(tmp_path, most=16)
    counts = []
    for number in range(22):
        cache.put(f"{number:02}", ROW)
        os.utime(cache.path(f"{number:02}"), (number, number))
        counts.append(len(list(tmp_path.iterdir())))
    assert counts[:19] == [*range(1, 19), 16] and max(counts) == 18
    assert cache.get("21", decode) == ROW and cache.get("00", decode) is None
