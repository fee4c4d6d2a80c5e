"""The other commands, in process; the demo as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lowtide import Plan
from lowtide.cli.main import main
from lowtide.extras import EXTRAS, MissingExtraError, require
from lowtide.report.writers import WRITERS
from lowtide.trace import write_trace
from tests.report.reports import small_plan, trace_of_chain
from tests.support.samples import importable
from tests.support.versions import needs_known_fsdp2

_MODULE = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))), (torch.randn(2048, 64),), {}

def pair():
    return build()[:2]

def spread(mesh):
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model, args, _ = build()
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"]), args

def four():
    return 1, 2, 3, 4

def broken():
    raise ValueError("no weights")

def alone():
    return nn.Linear(2, 2)

number = 3
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importable("command_line_sample", _MODULE, tmp_path, monkeypatch)


@pytest.mark.usefixtures("_module")
def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "command_line_sample:build", "--budget", "60%", "-o", "plan.json"]) == 0
    printed = capsys.readouterr().out
    plan = Plan.load("plan.json")
    assert printed.strip() == str(plan)
    assert plan.peak_bytes <= plan.budget_bytes < plan.unconstrained_peak_bytes


@pytest.mark.usefixtures("_module")
def test_plan_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by its path, from another folder; the arguments by keyword may be left out."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["plan", "../command_line_sample.py:pair", "--budget", "60%"]) == 0
    assert "60.0 %" in capsys.readouterr().out


@pytest.mark.usefixtures("_module")
def test_curve(capsys: pytest.CaptureFixture[str]) -> None:
    """Alone, and with a plan, whose budget is then one of its points."""
    assert main(["plan", "command_line_sample:build", "--curve", "--points", "3", "-o", "curve.json"]) == 0
    curve = Plan.load("curve.json").known_curve
    assert curve is not None
    assert capsys.readouterr().out == f"{curve}\n"
    assert main(["plan", "command_line_sample:build", "--budget", "60%", "--curve", "--points", "3", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["peak_bytes"] <= summary["budget_bytes"]
    budgets = [point["budget_bytes"] for point in summary["curve"]["points"]]
    assert budgets == sorted(budgets, reverse=True)
    assert summary["budget_bytes"] in budgets


@pytest.mark.parametrize("options", [[], ["--budget", "50%", "--points", "3"]])
def test_plan_needs_a_budget_or_a_curve(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "command_line_sample:build", *options]) == 2
    assert "--curve" in capsys.readouterr().err


@needs_known_fsdp2
@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize("command", ["plan", "fits"])
def test_a_mesh(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One that the callable is given, and one that its model is spread over for it."""
    mesh = ["--mesh", "dp=4", "--device", "H100-80GB", "--link", "nvlink", "--json"]
    assert main([command, "command_line_sample:spread", *mesh]) == 0
    own = json.loads(capsys.readouterr().out)["passes"]["without a plan"]
    assert own["collectives"] == 2 * 6, "a gather and a reduction for each of the blocks"
    assert main([command, "command_line_sample:pair", *mesh]) == 0
    assert json.loads(capsys.readouterr().out)["passes"]["without a plan"]["collectives"] == 2, "of one unit"
    assert main([command, "command_line_sample:pair", *mesh[:2], "--device", "1MiB"]) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mesh", "dp=2"], "give --device"),
        (["--mesh", "dp=2", "--device", "1GiB", "--budget", "50%"], "go without"),
        (["--mesh", "dp=2", "--device", "1GiB", "--chunked-loss"], "go without"),
        (["--device", "1GiB", "--budget", "50%"], "lowtide fits"),
    ],
)
def test_what_a_mesh_goes_with(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "command_line_sample:build", *options]) == 2
    assert words in capsys.readouterr().err


def test_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a plan and of a trace, in every form that it has; without an output as text."""
    monkeypatch.chdir(tmp_path)
    small_plan().save("plan.json")
    write_trace(trace_of_chain(), "run.trace.gz")
    for artefact in ("plan.json", "run.trace.gz"):
        forms = [f"{artefact}{each}" for each in WRITERS if artefact == "plan.json" or each != ".map.svg"]
        assert main(["report", artefact, *(part for form in forms for part in ("-o", form))]) == 0
        assert all(Path(form).stat().st_size > 300 for form in forms)
        capsys.readouterr()
        assert main(["report", artefact]) == 0
        assert capsys.readouterr().out == Path(f"{artefact}.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "-o", "out.html"], "cannot read missing.json"),
        (["plan.json", "-o", "out.pdf"], ".trace.json"),
        (["plan.json", "--budget", "50%"], "is a plan"),
        (["plan.json", "--measurement", "plan.json"], "not a measurement"),
        (["run.trace.gz", "--budget", "1%"], "larger --budget"),
        (["notes.txt"], "not JSON"),
        (["hollow.json"], "hollow.json: its schedule is not valid: "),
        (["result.json"], "neither a saved plan nor a trace: a JSON object with models, rounds"),
    ],
)
def test_report_refuses(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small_plan().save("plan.json")
    plan = json.loads(Path("plan.json").read_text())
    del plan["schedule"]["steps"][0]
    Path("hollow.json").write_text(json.dumps(plan))
    write_trace(trace_of_chain(), "run.trace.gz")
    Path("notes.txt").write_text("buy milk\n")
    Path("result.json").write_text('{\n"models": [],\n"rounds": 3\n}\n')
    assert main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_output_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as Python has it where it was closed
    assert main(["planners"]) == 0
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            monkeypatch.setattr("sys.stdout", full)
            assert main(["planners"]) == 2
        assert capsys.readouterr().err == "lowtide: cannot write what is printed: No space left on device.\n"


@pytest.mark.usefixtures("_module")
def test_plan_infeasible(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "command_line_sample:build", "--budget", "1kB"]) == 3
    assert "smallest budget" in capsys.readouterr().err


@pytest.mark.usefixtures("_module")
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("command_line_sample", "PACKAGE.MODULE:CALLABLE"),
        ("command_line_sample:", "PACKAGE.MODULE:CALLABLE"),
        ("no_such_module:build", "cannot load"),
        ("command_line_sample:missing", "cannot load"),
        ("command_line_sample:number", "not a callable"),
        ("command_line_sample:broken", "raised ValueError: no weights"),
        ("command_line_sample:alone", "not a tuple"),
        ("command_line_sample:four", "returned (int, int, int, int), not a tuple"),
        ("folder/no_such_file.py:build", "there is no file"),
    ],
)
def test_plan_bad_target(target: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", target, "--budget", "50%"]) == 2
    assert message in capsys.readouterr().err


def test_planners(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["planners"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("auto", "greedy", "keep-all", "effort="))


def test_env(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["env"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "cache") in printed
    assert all(word in printed for word in ("torch", "numpy", "cpu", "highspy (optional)"))


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "lowtide", "planners"], capture_output=True, text=True, check=True)
    assert "effort=" in done.stdout


def test_solving_needs_no_torch() -> None:
    code = "import sys, lowtide.cli.main, lowtide.planning, lowtide.cli.solve; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("package", EXTRAS)
def test_missing_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'lowtide\[{EXTRAS[package]}\]'") as caught:
        require(package)
    assert caught.value.extra == EXTRAS[package]


def test_page_without_jinja2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    small_plan().save(tmp_path / "plan.json")
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.html")]) == 2
    assert "pip install 'lowtide[viz]'" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "plan.json"), "-o", str(tmp_path / "plan.svg")]) == 0


def test_demo_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    arguments = ["--steps", "4", "--layers", "1", "--batch", "1", "--planner", "auto{effort=1}", "--budget", "60%"]
    assert main(["demo", *arguments, "--output", str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["losses_equal"]
    assert result["parameters_equal"]
    assert result["measured_peak_bytes"] <= result["predicted_peak_bytes"] <= result["budget_bytes"]
    assert (tmp_path / "out" / "memory.png").stat().st_size > 0
    assert "live at the peak" in (tmp_path / "out" / "plan.map.svg").read_text()
    printed, _ = capsys.readouterr()
    assert "equal to the bit" in printed
    assert f"training starts after {result['start_seconds']:.1f} s" in printed


def test_demo_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--steps", "1", "--output", str(tmp_path)]) == 2
    assert "at least 3 steps" in capsys.readouterr().err
