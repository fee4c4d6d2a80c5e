"""The benchmark over all architectures tells good, refused and unbuilt models apart, and survives a process that dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import breadth
from benchmarks.breadth import Row, main
from benchmarks.breadth_models import architectures

pytestmark = pytest.mark.slow  # the harness, not the library


def _rows(folder: Path) -> dict[str, Row]:
    found = [Row(**row) for row in json.loads((folder / "breadth.json").read_text())["rows"]]
    return {row.model: row for row in found}


def test_outcomes(tmp_path: Path) -> None:
    names = ["causal/codegen", "masked/bert", "masked/big_bird"]
    assert main(["--models", ",".join(names), "--planner", "greedy", "--results", str(tmp_path)]) == 0
    rows = _rows(tmp_path)
    assert {name: row.outcome for name, row in rows.items()} == dict(
        zip(names, ["not built", "good", "refused"], strict=True)
    )
    good = rows["masked/bert"]
    assert good.difference == 0
    assert 0 < good.measured_peak_bytes <= good.predicted_peak_bytes <= good.budget_bytes < good.eager_peak_bytes
    assert "replaces submodules" in rows["masked/big_bird"].message
    assert "replaces submodules" in (tmp_path / "breadth.md").read_text()


def test_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model is broken, and the others are run by another process."""
    names = [name for name in architectures() if name.startswith("causal/b")][:3]
    script = (
        "import sys; left = sys.argv[1].split(',')\n"
        "for name in left:\n"
        f"    if name == {names[1]!r}: sys.exit(3)\n"
        '    print(\'{"model": "\' + name + \'", "compiler": "eager", "outcome": "good"}\')\n'
        "    print('done ' + name)\n"
    )
    original = breadth.subprocess.Popen

    def started(command: Any, **options: Any) -> Any:
        return original([command[0], "-c", script, command[command.index("--models") + 1]], **options)

    monkeypatch.setattr(breadth.subprocess, "Popen", started)
    assert main(["--models", ",".join(names), "--results", str(tmp_path)]) == 1
    rows = _rows(tmp_path)
    assert [rows[name].outcome for name in names] == ["good", "broken", "good"]
    assert rows[names[1]].message == "the process ended with exit code 3"
