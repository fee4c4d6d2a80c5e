"""``lowtide compare``: the table, its files, failures as cells, and what is refused before anything runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.extras import MissingExtraError
from lowtide.ir import load_instance
from lowtide.report.comparison import OVER_TIME, Task, run_limited
from lowtide.solve import planner_names
from tests.support.chains import chain_dag

TABLE = """\
chain: 12 ops, peak without recomputation 6.8 KiB
planner                   100%             70%              1B
--------  --------------------  --------------  --------------
greedy    0.000* (0.000) N.N s    21.212 N.N s  unsolved N.N s
keep-all  0.000* (0.000) N.N s  unsolved N.N s  unsolved N.N s

overhead in % (proven lower bound), seconds of planning; * marks a proven optimum
"""


@pytest.fixture
def instance(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(chain_dag()))
    return str(path)


def _cells(path: Path) -> list[dict[str, object]]:
    data = json.loads(path.read_text())
    assert data["format"] == "lowtide-comparison/1"
    cells: list[dict[str, object]] = data["cells"]
    return cells


def test_table_json_and_plot(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, plots = tmp_path / "out.json", tmp_path / "plots"
    arguments = ["--planners", "greedy,keep-all", "--json", str(out), "--plot", str(plots)]
    assert main(["compare", instance, "--budgets", "100%,70%, 1B", *arguments]) == 0
    printed, _ = capsys.readouterr()
    assert re.sub(r"\d+\.\d s", "N.N s", printed) == TABLE
    graph, costs = load_instance(instance)
    cells = _cells(out)
    assert [(cell["planner"], cell["budget"]) for cell in cells[:3]] == [
        ("greedy", "100%"),
        ("keep-all", "100%"),
        ("greedy", "70%"),
    ]
    for cell in cells:
        solved = cell["status"] in ("optimal", "feasible")
        assert solved == (cell["time_ns"] is not None) == (cell["overhead_percent"] is not None)
        assert not solved or cell["peak_bytes"] <= cell["budget_bytes"]  # type: ignore[operator]
    assert len(graph.ops) == 12
    assert costs.total_time_ns == json.loads(out.read_text())["instances"][0]["time_ns"]
    assert (plots / "chain.png").stat().st_size > 0


def test_a_second_memory(instance: str, tmp_path: Path) -> None:
    """Asked here and in a process of its own, the planners know of the same link."""
    found = []
    for name, more in (("here", []), ("apart", ["--time-limit", "60"])):
        out = tmp_path / f"{name}.json"
        link = ["--offload", "100GB/s", "--planners", "auto,pofo,greedy", "--json", str(out)]
        assert main(["compare", instance, "--budgets", "70%", *link, *more]) == 0
        found.append({str(cell["planner"]): cell["time_ns"] for cell in _cells(out)})
    here, apart = found
    assert here == apart
    assert here["auto"] < here["greedy"]  # type: ignore[operator]


def test_all_planners_by_default(instance: str, tmp_path: Path) -> None:
    pytest.importorskip("highspy")
    out = tmp_path / "out.json"
    assert main(["compare", instance, "--budgets", "70%", "--json", str(out)]) == 0
    cells = _cells(out)
    assert tuple(cell["planner"] for cell in cells) == planner_names()
    assert not [cell["message"] for cell in cells if cell["status"] == "failed"]


def test_missing_extra_leaves_planners_out(
    instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    out = tmp_path / "out.json"
    assert main(["compare", instance, "--budgets", "90%", "--json", str(out)]) == 0
    assert capsys.readouterr().err.count("left out: checkmate, checkmate-approx") == 1
    assert not [cell for cell in _cells(out) if str(cell["planner"]).startswith("checkmate")]


def test_a_planner_that_fails_is_a_cell(
    instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    out = tmp_path / "out.json"
    arguments = ["--planners", "checkmate,greedy", "--json", str(out)]
    assert main(["compare", instance, "--budgets", "70%", *arguments]) == 0
    failed, other = _cells(out)
    assert (failed["status"], other["planner"]) == ("failed", "greedy")
    assert "lowtide[ilp]" in str(failed["message"])
    assert "checkmate at 70%: " in capsys.readouterr().out


def test_two_instances_of_one_name(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "chain.json"
    other.write_text(json.dumps(chain_dag(4)))
    assert main(["compare", instance, str(other), "--budgets", "80%", "--planners", "greedy"]) == 0
    printed = capsys.readouterr().out
    assert f"{instance}: 12 ops" in printed
    assert f"{other}: 8 ops" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budgets", "50%", "--planners", "greedy,magic"], "no planner is named 'magic'"),
        (["--budgets", "50%", "--planners", "auto{effort=1,speed=2}"], "no option 'speed'"),
        (["--budgets", "50%", "--planners", ","], "names no planner"),
        (["--budgets", "50%,much"], "not a budget"),
        (["--budgets", "50%", "--time-limit", "0"], "must be above 0"),
        (["--budgets", "50%", "--offload", "fast"], "'fast' is not a bandwidth"),
    ],
)
def test_bad_input(instance: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", instance, *arguments]) == 2
    printed, error = capsys.readouterr()
    assert message in error
    assert printed == ""


def test_one_plot_file_for_two_instances(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other = tmp_path / "other.json"
    other.write_text(json.dumps(chain_dag(4)))
    arguments = ["--budgets", "80%", "--planners", "greedy", "--plot", str(tmp_path / "one.png")]
    assert main(["compare", instance, str(other), *arguments]) == 2
    assert "name a folder" in capsys.readouterr().err


def test_plot_needs_matplotlib(
    instance: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", instance, "--budgets", "80%", "--planners", "greedy", "--plot", "x.png"]) == 2
    assert MissingExtraError.__name__ not in capsys.readouterr().err


def test_time_limit(instance: str, tmp_path: Path) -> None:
    long = tmp_path / "long.json"
    long.write_text(json.dumps(chain_dag(150)))
    patient = Task("long", "auto{effort=5}", "40%", 60_000)
    assert run_limited(long, patient, 0.001).status == OVER_TIME
    quick = run_limited(instance, Task("chain", "keep-all", "100%", 10_000), 60.0)
    assert (quick.status, quick.overhead_percent) == ("optimal", 0.0)
    assert quick.cpu_seconds is not None
