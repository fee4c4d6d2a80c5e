"""``--largest NAME``: the largest number that fits does, and one more does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli.main import main
from tests.support.samples import importable
from tests.support.versions import needs_known_fsdp2

_MODULE = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

def build(batch=8, layers=4):
    with torch.device("meta"):
        blocks = (nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers))
        return nn.Sequential(*blocks), (torch.empty(64 * batch, 64),)

def spread(mesh, batch):
    model, args = build(batch)
    return fully_shard(model, mesh=mesh["dp"]), args

def heads(batch=1):
    if batch % 8:
        raise ValueError("not a multiple of 8")
    return build(batch)

def fixed():
    return build()
"""
_MESH = ["--mesh", "dp=2", "--device", "1MiB"]


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    importable("largest_sample", _MODULE, tmp_path, monkeypatch)


@needs_known_fsdp2
@pytest.mark.parametrize(
    ("command", "target", "name"),
    [("plan", "build", "batch"), ("plan", "spread", "batch"), ("plan", "build", "layers"), ("fits", "build", "batch")],
)
def test_it_fits_and_one_more_does_not(
    command: str, target: str, name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = [f"largest_sample:{target}", *_MESH, "--planner", "auto{effort=0}", "--json"]
    assert main([command, *where, "--largest", name]) == 0
    found = json.loads(capsys.readouterr().out)
    number = found["searched"]["number"]
    assert found["fits"]
    assert found["peak_bytes"] <= found["room_bytes"]
    assert 0 < found["searched"]["without"] < number
    for given, code in ((number, 0), (number + 1, 3)):
        passed = f"mesh, {given}" if target == "spread" else f"{name}={given}"
        (tmp_path / f"given{given}.py").write_text(
            f"import largest_sample\ndef build(mesh):\n    return largest_sample.{target}({passed})\n"
        )
        assert main([command, f"given{given}.py:build", *where[1:]]) == code


@needs_known_fsdp2
@pytest.mark.parametrize("command", ["plan", "fits"])
def test_what_is_said_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "largest_sample:build", *_MESH, "--planner", "auto{effort=0}", "--largest", "batch"]) == 0
    said = capsys.readouterr().out
    assert "largest batch" in said
    assert "spread over dp=2, fits with a plan" in said


def test_where_not_even_one_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fits", "largest_sample:build", "--device", "64KiB", "--largest", "batch", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["searched"]["number"], found["searched"]["without"], found["fits"]) == (0, 0, False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "largest_sample:build", "--largest", "batch", "--budget", "50%"], "that of a --mesh"),
        (["fits", "largest_sample:fixed", "--device", "1MiB", "--largest", "batch"], "def build(batch=1)"),
        (
            ["fits", "largest_sample:heads", "--device", "1MiB", "--largest", "batch"],
            "heads(batch=1) raised ValueError",
        ),
    ],
)
def test_what_makes_no_sense(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


@needs_known_fsdp2
def test_a_default_is_no_place_for_the_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a callable whose first argument is a number."""
    assert main(["plan", "largest_sample:build", *_MESH]) == 0
    assert "spread over dp=2" in capsys.readouterr().out
