"""``lowtide trace``: one replay, tables, JSON, graphs, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.online_theorem import linear_network
from lowtide.cli.main import main
from lowtide.trace import write_trace

KEYS = [
    "status", "heuristic", "policy", "budget", "budget_bytes", "unconstrained_peak_bytes", "peak_bytes", "slowdown",
    "overhead_percent", "time_ns", "base_ns", "evictions", "rematerializations", "operator", "seconds",
]  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "linear.gz"
    write_trace(linear_network(49), path)
    return str(path)


def test_one_replay(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", trace, "--budget", "50%", "--heuristic", "dtr"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "linear network of 49 layers: 98 calls, 98 ns, peak 49 B",
        "ok with dtr, eager",
        "  budget    24 B (24 bytes)",
        "  peak      24 B (24 bytes)",
        "  slowdown  1.2551",
        "  evictions 25, rematerializations 25",
    ]


def test_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", trace, "--budget", "50%", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == KEYS
    assert (result["status"], result["budget_bytes"], result["unconstrained_peak_bytes"]) == ("ok", 24, 49)
    assert result["slowdown"] == pytest.approx(result["time_ns"] / result["base_ns"], abs=1e-6)
    assert main(["trace", trace, "--budget", "30%,2", "--heuristic", "lru,dtr-eq", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["heuristic"], row["budget"]) for row in rows] == [
        ("lru", "30%"), ("lru", "2"), ("dtr-eq", "30%"), ("dtr-eq", "2"),
    ]  # fmt: skip
    assert [row["status"] for row in rows] == ["thrash", "OOM", "ok", "OOM"]
    assert (rows[0]["slowdown"], rows[0]["operator"]) == (None, "forward")


def test_table(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", trace, "--budget", "100%,30%,2B", "--heuristic", "dtr-eq,lru", "--policy", "banish"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "heuristic    100%     30%   2B",
        "---------  ------  ------  ---",
        "dtr-eq     1.0000  1.3571  OOM",
        "lru        1.0000  thrash  OOM",
    ]


def test_samples_are_drawn_from_the_seed(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", trace, "--budget", "40%", "--sample", "--skip-small", "--seed", "3"]
    printed = []
    for _ in range(2):
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_facts(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", trace]) == 0
    assert capsys.readouterr().out == "linear network of 49 layers: 98 calls, 98 ns, peak 49 B\n"
    assert main(["trace", trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unconstrained_peak_bytes"] == 49


@pytest.mark.parametrize("option", ["--to-dag", "--to-graph"])
def test_a_graph_to_plan(option: str, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "dag.json")
    assert main(["trace", trace, option, out]) == 0
    assert capsys.readouterr().out == ""
    assert main(["solve", out, "--budget", "50%", "--planner", "dtr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unconstrained_peak_bytes"] == 49
    assert main(["compare", out, "--budgets", "50%", "--planners", "dtr,greedy"]) == 0


def test_too_small_a_budget(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", trace, "--budget", "2", "--json"]) == 3
    printed, message = capsys.readouterr()
    assert json.loads(printed)["status"] == "OOM"
    assert "nothing left to evict when" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.log"], "cannot read missing.log"),
        (["{trace}", "--budget", "12 apples"], "not a budget"),
        (["{trace}", "--budget", "50%", "--heuristic", "best"], "no heuristic is named 'best'; known: dtr-eq"),
        (["{trace}", "--budget", "50%", "--policy", "never"], "no policy is named 'never'; known: eager"),
        (["{trace}", "--budget", "50%", "--thrash", "0.5"], "--thrash is 0.5"),
        (["{trace}", "--to-dag", "missing/folder/out.json"], "cannot write"),
    ],
)
def test_bad_input(trace: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *(argument.replace("{trace}", trace) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err
