"""The cache file: merged, atomic, and never trusted."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch

from lowtide.cost.cache import FORMAT, CostCache, OperatorCost
from lowtide.store.files import read_regular
from tests.store.entries import signed

COST = OperatorCost(5, 1, 4096, (4096, 0), (1, -1))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "new" / "folder"))


def _path() -> Path:
    cache = CostCache.open(CPU)
    assert cache.entries is not None
    return cache.entries.path(cache.key)


def _write(text: str) -> Path:
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_round_trip() -> None:
    cache = CostCache.open(CPU)
    cache.put("a", COST)
    cache.put("this process only", COST, keep=False)
    cache.save()
    assert CostCache.open(CPU).costs == {"a": COST}


def test_two_processes_add_to_each_other() -> None:
    first, second = CostCache.open(CPU), CostCache.open(CPU)
    first.put("a", COST)
    second.put("b", COST)
    first.save()
    second.save()
    assert set(CostCache.open(CPU).costs) == {"a", "b"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        signed("another/1", {}),
        json.dumps({"format": FORMAT}),
        json.dumps({"format": FORMAT, "sha256": "0", "entry": {"a": [5, 1, 4096, [4096], [1]]}}),
        signed(FORMAT, {"a": [1, 2]}),
        signed(FORMAT, {"a": [1, 2, "3", [4], [1]]}),
        signed(FORMAT, {"a": [1, 2, 3, [4], [1, 2]]}),
        signed(FORMAT, {"a": [1, 2, -3, [4], [1]]}),
        signed(FORMAT, {"a": [-1, 2, 3, [4], [1]]}),
        signed(FORMAT, {"a": [1, 2, 3, [4], [-2]]}),
        signed(FORMAT, {"a": [1 << 51, 2, 3, [4], [1]]}),
        signed(FORMAT, {"a": [1e30, 2, 3, [4], [1]]}),
        signed(FORMAT, {"a": [1, 2, 3, [4], [1], 5]}),
        signed(FORMAT, {"a": [int("9" * 400), 2, 3, [4], [1]]}),
        signed(FORMAT, {"a": [float("inf"), 2, 3, [4], [1]]}),
        signed(FORMAT, {"a": [True, 2, 3, [4], [1]]}),
        signed(FORMAT, 7),
    ],
)
def test_foreign_files_are_ignored_and_rewritten(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(text)
    with caplog.at_level(logging.WARNING):
        cache = CostCache.open(CPU)
    assert cache.costs == {}
    assert str(path) in caplog.text
    cache.put("a", COST)
    cache.save()
    assert CostCache.open(CPU).costs == {"a": COST}
    assert [file.suffix for file in path.parent.iterdir() if file.suffix == ".tmp"] == []


def test_a_folder_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file" / "below"))
    cache = CostCache.open(CPU)
    cache.put("a", COST)
    with caplog.at_level(logging.WARNING):
        cache.save()
    assert "cannot be kept" in caplog.text
    assert cache.get("a", outputs=2) == COST


def test_emptied_lists_are_of_no_operator() -> None:
    cache = CostCache.open(CPU)
    cache.put("a", OperatorCost(1, 0, 8, (), ()))
    cache.save()
    assert CostCache.open(CPU).get("a", outputs=1) is None
    cache.put("a", COST)
    cache.save()
    assert CostCache.open(CPU).get("a", outputs=2) == COST


def test_what_another_process_measures_is_known_at_once() -> None:
    first, second = CostCache.open(CPU), CostCache.open(CPU)
    with first.measuring():
        first.put("a", COST)
    with second.measuring():
        assert second.get("a", outputs=2) == COST


def test_the_costs_measured_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.cost.cache._MOST_OPERATORS", 2)
    for name in ("a", "b", "a", "c"):
        cache = CostCache.open(CPU)
        cache.put(name, COST)
        cache.save()
    assert set(CostCache.open(CPU).costs) == {"a", "c"}


def test_a_file_that_has_not_changed_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program opens the cache, which has the costs of all."""
    cache = CostCache.open(CPU)
    cache.put("a", COST)
    cache.save()
    read: list[Path] = []

    def counted(path: Path, most_bytes: int) -> bytes:
        read.append(path)
        return read_regular(path, most_bytes)

    monkeypatch.setattr("lowtide.store.cache.read_regular", counted)
    assert [CostCache.open(CPU).get("a", outputs=2) for _ in range(3)] == [COST] * 3
    assert not read
    assert cache.entries is not None
    path = cache.entries.path(cache.key)
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(1, 1))  # as another process leaves it
    assert [CostCache.open(CPU).get("a", outputs=2) for _ in range(3)] == [COST] * 3
    assert read == [path]
