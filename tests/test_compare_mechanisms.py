"""The harness that compares mechanisms: every eager one runs, matches eager's gradients, and is judged rightly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.compare.__main__ import main, read_rows, settings_of
from benchmarks.compare.mechanisms import EAGER, MECHANISMS
from benchmarks.compare.models import COMPARED, LARGE, SMALL, Compared, of_class
from benchmarks.compare.report import document, lost
from benchmarks.compare.worker import Row
from benchmarks.compare.worker import main as work

pytestmark = pytest.mark.slow  # the harness, not the library

# The shared shift makes the model no chain, which rotor and rockmate need; checkmate takes long.
_NOT_HERE = ("lowtide-checkmate", "lowtide-rockmate", "lowtide-rotor")


class Block(nn.Module):
    """Takes a tensor that needs a gradient by keyword, as attention blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x) + shift


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shift = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, shift = self.first(x), self.shift.exp()
        for block in self.blocks:
            x = block(x, shift=shift)
        return x.square().mean()


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    small = Compared(lambda batch: (Tiny(), (torch.randn(batch, 64),), {}), 512, of_class("Block"))
    monkeypatch.setitem(COMPARED, "tiny", small)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize("mechanism", [name for name in EAGER if name not in _NOT_HERE])
def test_eager_mechanisms(mechanism: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["60%"] if MECHANISMS[mechanism].budgeted else []
    flags = ["--rounds=2", "--planner=greedy", f"--threads={torch.get_num_threads()}"]
    assert work([*flags, "tiny", mechanism, *settings]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    row = Row(**found)
    assert row.message == ""
    assert row.gradient_error < 1e-6
    assert row.peak_bytes == row.plain_peak_bytes if mechanism == "plain" else row.peak_bytes < row.plain_peak_bytes
    assert row.step_ns > 0 and row.time_ratio > 0
    if settings:
        assert row.peak_bytes <= 0.6 * row.plain_peak_bytes
    assert bool(row.predicted_peak_bytes) == (MECHANISMS[mechanism].budgeted and mechanism != "lowtide-online")


@pytest.mark.usefixtures("_tiny")
def test_what_fails_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert work(["--rounds=2", "--planner=greedy", "tiny", "lowtide", "0%", "90%"]) == 0
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
    assert rows[0].message.startswith("PlanError: a budget of 0 is 0 bytes")
    assert rows[1].message == "" and rows[1].peak_bytes > 0
    assert "PlanError" in document(rows, {})


def test_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--results", str(tmp_path), "--budgets", "50%"]) == 0
    printed = capsys.readouterr().out.strip().split("\n")
    assert len(printed) == len(SMALL) * len(MECHANISMS)
    assert all(line.startswith("-m benchmarks.compare.worker") for line in printed)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit, match="unknown mechanisms: magic"):
        main(["--dry-run", "--mechanisms", "magic"])


def test_dry_run_for_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peaks = [dataclasses.asdict(_row("checkpoint", 300, 1.3, model="gpt2-xl"))]
    (tmp_path / "compare.json").write_text(json.dumps({"rows": peaks}))  # of another device
    assert main(["--dry-run", "--device", "cuda", "--mechanisms", "lowtide", "--results", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.strip().split("\n")
    assert [line.split("auto ")[1] for line in printed] == [f"{model} lowtide 70% 50% 30%" for model in LARGE]


@pytest.mark.parametrize(
    ("name", "parameters", "blocks"),
    [
        ("gpt2-medium", 355e6, 24),
        ("gpt2-xl", 1558e6, 48),
        ("llama-1b", 1236e6, 16),
        ("resnet101", 44.5e6, 33),
        ("unet-sd", 860e6, 38),
    ],
)
def test_large_models(name: str, parameters: float, blocks: int) -> None:
    """Built without memory: they have the published numbers of parameters, and blocks to checkpoint."""
    compared = LARGE[name]
    with torch.device("meta"):
        model, args, kwargs = compared.sample(1)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.003)
    assert len(compared.blocks(model)) == blocks
    given = [t for t in (*args, *kwargs.values(), *model.parameters()) if t.is_floating_point()]
    assert given and all(tensor.dtype == compared.dtype for tensor in given)


def test_reserved_memory_is_told() -> None:
    rows = [_row("plain", 1000, 1.0, reserved_bytes=1500, rounding=1e-3), _row("checkpoint", 0, 0.0, message="failed")]
    text = document(rows, {"device": "a GPU"})
    head, _, plain, failed = [line for line in text.split("\n") if line.startswith("|")]
    assert len({line.count("|") for line in (head, plain, failed)}) == 1
    assert "| plain |  | 1.000 | 1.500 | 1.00 |" in text


def _row(mechanism: str, peak: int, time: float, **changes: Any) -> Row:
    row = Row("gpt2", mechanism, "", plain_peak_bytes=1000, peak_bytes=peak, time_ratio=time)
    return dataclasses.replace(row, **changes)


def test_lowtide_runs_at_the_peaks_of_its_kind() -> None:
    rows = [
        _row("checkpoint", 300, 1.3),
        _row("checkpoint-reentrant", 305, 1.3),  # about the same
        _row("selective", 500, 1.1),
        _row("plain", 1000, 1.0),
        _row("compile", 600, 0.9),
        _row("compile-budget-dp", 1080, 0.8),  # more than plain eager's
        _row("lowtide-rotor", 400, 1.2),
        _row("compile-checkpoint", 0, 0.0, message="failed"),
        _row("selective", 200, 1.1, model="t5"),
    ]
    assert settings_of("gpt2", "lowtide", ["50%"], rows) == ("50%", "300", "500")
    assert settings_of("gpt2", "lowtide-inductor", ["50%"], rows) == ("50%", "600", "1080")
    assert settings_of("gpt2", "lowtide-dtr", ["50%"], rows) == ("50%",)
    assert settings_of("gpt2", "checkpoint", ["50%"], rows) == ("",)


def test_lost_cells() -> None:
    beaten, matched = _row("checkpoint", 300, 1.3), _row("selective", 500, 1.1)
    wrong, compiled = _row("checkpoint-reentrant", 100, 1.0, gradient_error=0.5), _row("compile", 400, 0.9)
    ours = [_row("lowtide", 290, 1.4), _row("lowtide", 480, 1.12)]
    rows = [beaten, matched, wrong, compiled, _row("plain", 1000, 0.9), *ours]
    assert list(lost(rows)) == [(beaten, ours[0])]
    assert list(lost([*rows, _row("lowtide-inductor", 450, 0.9)])) == [(beaten, ours[0]), (compiled, None)]
    larger = _row("selective", 1010, 0.99)
    assert list(lost([*rows, larger])) == [(beaten, ours[0]), (larger, ours[1])]
    text = document(rows, {"device": "cpu"})
    assert "| gpt2 | checkpoint |  | 0.300 | 1.30 | 0.290 | 1.40 |" in text
    assert "WRONG" in text


def test_results_are_read_back(tmp_path: Path) -> None:
    rows = [_row("checkpoint", 300, 1.3)]
    (tmp_path / "compare.json").write_text(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))
    assert read_rows(tmp_path / "compare.json") == rows
    assert read_rows(tmp_path / "none.json") == []
