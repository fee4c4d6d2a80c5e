"""The cache of compiled kernels: whatever is on disk, and whatever the disk does, the kernel computes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from lowtide.solve.model.compiled import kernel, sweep_kernels
from tests.store.disks import full_disk


def _add(a: Any, b: Any) -> Any:
    return a + b


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """A fresh dispatcher of one kernel, kept in ``tmp_path / "kernels"``."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    return lambda: kernel(_add)


def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in folder.rglob(f"*{suffix}") if path.is_file()]


def _hits(dispatcher: Any) -> int:
    return sum(dispatcher.stats.cache_hits.values())


def test_a_kernel_is_compiled_once(add: Callable[[], Any]) -> None:
    first, second = add(), add()
    assert (first(2, 3), second(2, 3)) == (5, 5)
    assert (_hits(first), _hits(second)) == (0, 1)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("size", [0, 5, -40, None])
def test_damaged_kernels_are_compiled_anew(
    add: Callable[[], Any], suffix: str, size: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut off, or (``None``) with a flipped bit in the middle, which would be machine code."""
    add()(2, 3)
    (path,) = _files(tmp_path, suffix)
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes(flipped if size is None else content[:size])
    with caplog.at_level(logging.WARNING):
        again = add()
        assert again(2, 3) == 5
    assert _hits(again) == 0
    assert len([record for record in caplog.records if "ignoring a compiled kernel" in record.getMessage()]) == 1
    third = add()
    assert (third(2, 3), _hits(third)) == (5, 1)


def test_a_full_disk(add: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kernels"
    with full_disk(folder), caplog.at_level(logging.WARNING):
        found = add()
        assert (found(2, 3), found(np.arange(3), 1).tolist()) == (5, [1, 2, 3])
        left = _files(folder, ".nbc")
    assert not left
    assert all("cannot be kept" in record.getMessage() for record in caplog.records)
    assert caplog.records or not _hits(found)


def test_no_folder_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator", raising=False)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.INFO, "lowtide"):
        assert kernel(_add)(2, 3) == 5


def test_folders_of_other_sources_are_swept(tmp_path: Path) -> None:
    """But those used last, and those used today; and not what else is in the cache folder."""
    now = time.time()
    days = {
        "kernels-own": 99,
        "plans": 99,
        "kernels-a": 2,
        "kernels-b": 3,
        "kernels-c": 4,
        "kernels-d": 5,
        "kernels-e": 6,
    }
    for name, age in days.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.tmp.1").touch()
        os.utime(tmp_path / name / "index.tmp.1", (now - 86_400 * age,) * 2)
        os.utime(tmp_path / name, (now - 86_400 * age,) * 2)
    sweep_kernels(tmp_path / "kernels-own")
    assert {path.name for path in tmp_path.iterdir()} == {"kernels-own", "plans", "kernels-a", "kernels-b", "kernels-c"}
    assert not [*(tmp_path / "kernels-own").iterdir()]
    assert [*(tmp_path / "plans").iterdir()]
