"""Several real processes: one makes while the others wait, and one that is killed holds nobody up."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from lowtide.store import Cache

_MAKER = """
import sys, time
from pathlib import Path
from lowtide.store import Cache
folder, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
while not (folder.parent / "start").exists():
    time.sleep(0.01)

def make():
    (folder.parent / f"made-by-{name}").touch()
    time.sleep(seconds)
    return {"by": name}

import msgspec
print(Cache(folder, "tests/1", 9).get_or_make("a", msgspec.json.decode, make, dict, 60)["by"])
"""

_PLANNER = """
import sys, time
from pathlib import Path
import torch, lowtide
from lowtide.cost import measured
from lowtide.planning import make
from tests.test_plan_cache import _model
folder = Path(sys.argv[1])
searched, solve, tried, measure = [], make.solve, [], measured.measure_operator
make.solve = lambda *args: searched.append(args) or solve(*args)
measured.measure_operator = lambda *args: tried.append(args) or measure(*args)
(folder / f"ready-{sys.argv[2]}").touch()
while not (folder / "start").exists():
    time.sleep(0.01)
plan = lowtide.plan(_model(), (torch.randn(256, 16),), budget="60%", planner="greedy")
print(len(searched), bool(tried), plan.cached, plan.peak_bytes, plan.time_ns)
"""


def _start(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def _wait_for(*paths: Path, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, paths
        time.sleep(0.02)


def _output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return text.strip()


def test_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    processes = [_start(_MAKER, folder, number, 0.5) for number in range(6)]
    (tmp_path / "start").touch()
    answers = {_output(process) for process in processes}
    assert len(answers) == 1
    assert [path.name for path in tmp_path.glob("made-by-*")] == [f"made-by-{answers.pop()}"]
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_a_killed_maker_frees_the_lock(tmp_path: Path) -> None:
    """And the file that it was about to write is swept, once it is old."""
    folder = tmp_path / "cache"
    (tmp_path / "start").touch()
    maker = _start(_MAKER, folder, "killed", 1000)
    _wait_for(tmp_path / "made-by-killed")
    assert [path.name for path in folder.iterdir()] == ["a.lock"]
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    began = time.monotonic()
    assert _output(_start(_MAKER, folder, "other", 0)) == "other"
    assert time.monotonic() - began < 50  # of the patience of 60 s
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_patience_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    (tmp_path / "start").touch()
    maker = _start(_MAKER, folder, "slow", 1000)
    _wait_for(tmp_path / "made-by-slow")
    try:
        with caplog.at_level(logging.WARNING):
            cache = Cache(folder, "tests/1", 9)
            found = cache.get_or_make("a", msgspec.json.decode, lambda: {"by": "me"}, dict, patience_seconds=0.2)
        assert found == {"by": "me"}
        assert "not waiting any longer" in caplog.text
    finally:
        maker.kill()
        maker.communicate()


_WRITER = """
import sys
from pathlib import Path
from lowtide.store import write_atomically
content = bytes(1 << 24)
while True:
    write_atomically(Path(sys.argv[1]), content)
    print("written", flush=True)
"""


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    """Killed at any moment: the file is whole, and whatever is left beside it is what the store sweeps."""
    path = tmp_path / "entry.json"
    for _ in range(3):
        process = _start(_WRITER, path)
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
        process.communicate()
        assert path.stat().st_size == 1 << 24
        assert {other.suffix for other in tmp_path.iterdir()} <= {".json", ".tmp"}
    for left in tmp_path.glob(".*.tmp"):
        os.utime(left, (0, 0))
    Cache(tmp_path, "tests/1", 9).put("a", 1)
    assert sorted(other.name for other in tmp_path.iterdir()) == ["a.json", "entry.json"]


@pytest.mark.parametrize("count", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_those_that_start_together_measure_and_plan_once(count: int, tmp_path: Path) -> None:
    environment = {"LOWTIDE_CACHE_DIR": str(tmp_path / "cache"), "LOWTIDE_PLAN_CACHE": "1"}
    processes = [_start(_PLANNER, tmp_path, number, **environment) for number in range(count)]
    _wait_for(*(tmp_path / f"ready-{number}" for number in range(count)))
    (tmp_path / "start").touch()
    answers = [_output(process).split() for process in processes]
    assert sorted(answer[0] for answer in answers) == ["0"] * (count - 1) + ["1"]  # searches
    assert sorted(answer[1] for answer in answers) == ["False"] * (count - 1) + [
        "True"
    ]  # whether operators were measured
    assert sorted(answer[2] for answer in answers) == ["False"] + ["True"] * (
        count - 1
    )  # whether the plan was in the cache
    assert len({tuple(answer[3:]) for answer in answers}) == 1
