"""The cache file: merged, atomic, and never trusted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from lowtide.cost.cache import CostCache, Record, cache_folder

RECORD = Record(5, 1, 4096, (4096, 0), (1, -1))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "new" / "folder"))


def _write(text: str) -> Path:
    path = CostCache.open(CPU).path
    assert path is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_round_trip() -> None:
    cache = CostCache.open(CPU)
    cache.put("a", RECORD)
    cache.put("this process only", RECORD, keep=False)
    cache.save()
    assert CostCache.open(CPU).records == {"a": RECORD}


def test_two_processes_add_to_each_other() -> None:
    first, second = CostCache.open(CPU), CostCache.open(CPU)
    first.put("a", RECORD)
    second.put("b", RECORD)
    first.save()
    second.save()
    assert set(CostCache.open(CPU).records) == {"a", "b"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1, 2]",
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
        json.dumps({"format": "another/1", "records": {}}),
        json.dumps({"format": "lowtide-costs/3"}),
        json.dumps({"format": "lowtide-costs/3", "records": {"a": [1, 2]}}),
        json.dumps({"format": "lowtide-costs/3", "records": {"a": [1, 2, "3", [4], [1]]}}),
        json.dumps({"format": "lowtide-costs/3", "records": {"a": [1, 2, 3, [4], [1, 2]]}}),
        json.dumps({"format": "lowtide-costs/3", "records": {"a": [1, 2, -3, [4], [1]]}}),
        json.dumps({"format": "lowtide-costs/3", "records": 7}),
    ],
)
def test_foreign_files_are_ignored_and_rewritten(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = _write(text)
    with caplog.at_level(logging.WARNING):
        cache = CostCache.open(CPU)
    assert cache.records == {}
    assert str(path) in caplog.text
    cache.put("a", RECORD)
    cache.save()
    assert CostCache.open(CPU).records == {"a": RECORD}
    assert [file.suffix for file in path.parent.iterdir() if file.suffix == ".tmp"] == []


def test_a_folder_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "file" / "below"))
    cache = CostCache.open(CPU)
    cache.put("a", RECORD)
    with caplog.at_level(logging.WARNING):
        cache.save()
    assert "cannot be kept" in caplog.text
    assert cache.get("a") == RECORD


def test_the_platform_folder_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    assert cache_folder().name == "lowtide"
