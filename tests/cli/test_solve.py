"""``lowtide solve``: one JSON object, exit codes, files."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.ir import Lane, SecondMemory, check, keep_all_schedule, simulate
from lowtide.ir.serial import graph_to_json, load_instance, read_json, schedule_from_json
from lowtide.planning import make_plan
from tests.support.chains import LAYER_BYTES, chain_dag

KEYS = [
    "status", "planner", "budget_bytes", "peak_bytes", "unconstrained_peak_bytes", "time_ns", "overhead_percent",
    "lower_bound_percent", "lower_bound_ns", "gap_percent", "solve_seconds", "schedule",
]  # fmt: skip
MIN_PEAK_KEYS = [
    "status", "minimum_bytes", "lower_bound_bytes", "gap_percent", "time_ns", "overhead_percent", "planner",
    "unconstrained_peak_bytes", "solve_seconds", "schedule",
]  # fmt: skip


@pytest.fixture
def instance(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(chain_dag()))
    return str(path)


def test_json(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", instance, "--budget", "70%", "--json"]) == 0
    printed, progress = capsys.readouterr()
    result = json.loads(printed)
    assert list(result) == KEYS
    assert progress == ""
    assert result["status"] in ("optimal", "feasible")
    assert result["peak_bytes"] <= result["budget_bytes"] == result["unconstrained_peak_bytes"] * 70 // 100
    assert _replay(chain_dag(), result["schedule"]) == (result["peak_bytes"], result["time_ns"])
    assert result["overhead_percent"] > 0


def test_text_and_schedule_file(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schedule.json"
    assert (
        main(["solve", instance, "--budget", "70%", "--planner", "auto{effort=1}", "--seed", "2", "-o", str(out)]) == 0
    )
    assert "overhead" in capsys.readouterr().out
    graph, costs = load_instance(instance)
    schedule = schedule_from_json(read_json(out))
    check(graph, schedule)
    whole = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    assert simulate(graph, costs, schedule).peak_bytes <= 70 * whole // 100


def test_a_schedule_that_overwrites(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps have three parts where one writes over an input; printed, and written to what is no file."""
    path = tmp_path / "graph.json"
    graph, costs = load_instance(instance)
    ops = tuple(dataclasses.replace(op, overwrites=op.inputs[-1:]) for op in graph.ops)
    path.write_text(json.dumps(graph_to_json(dataclasses.replace(graph, ops=ops), costs)))
    assert main(["solve", str(path), "--budget", "100%", "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["schedule"]
    assert any(len(step) == 3 for step in steps)
    assert main(["solve", str(path), "--budget", "100%", "-o", os.devnull]) == 0
    assert "computes" in capsys.readouterr().out
    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "-1 is below 0"),
        (["--budget", "9e20"], "more than any device has"),
        (["-o", "{instance}/x"], "cannot write"),
        (["-o", "{folder}/" + 300 * "x"], "cannot write"),
    ],
)
def test_options_that_cannot_be(
    instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    given = [text.format(instance=instance, folder=tmp_path) for text in arguments]
    try:
        code = main(["solve", instance, "--budget", "80%", *given])
    except SystemExit as error:  # argparse's own
        code = int(error.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["chain.json"]


def test_saved_plan_is_an_instance(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, costs = load_instance(instance)
    make_plan(graph, costs, budget="80%").save(tmp_path / "plan.json")
    assert main(["solve", str(tmp_path / "plan.json"), "--budget", "100%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overhead_percent"] == 0


def test_a_second_memory(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schedule.json"
    link = ["--offload", "100GB/s,50GB/s", "--offload-latency", "0.001"]
    assert main(["solve", instance, "--budget", "70%", "--json", *link, "-o", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == [*KEYS[:-1], "transfers", "schedule"]
    assert read_json(out)["format"] == "lowtide-schedule/2"
    graph, costs = load_instance(instance)
    costs = dataclasses.replace(costs, second_memory=SecondMemory(100_000_000_000, 50_000_000_000, 1))
    schedule = schedule_from_json(read_json(out))
    check(graph, schedule)
    run = simulate(graph, costs, schedule)
    assert (run.peak_bytes, run.time_ns) == (result["peak_bytes"], result["time_ns"])
    moved = result["transfers"]
    assert moved["fetched_bytes"] >= moved["second_peak_bytes"] > 0
    assert sum(step[0] == "fetch" for step in result["schedule"]) == sum(
        one.lane is Lane.FETCH for one in run.timing.transfers
    )
    assert main(["solve", instance, "--budget", "70%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["time_ns"] > result["time_ns"]
    assert main(["solve", instance, "--budget", "70%", *link, "--offload-budget", "0.5KiB"]) == 0
    assert "to the second memory" in capsys.readouterr().out


def test_checkmate_with_a_second_memory(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    arguments = ["solve", instance, "--budget", "60%", "--json", "--planner", "checkmate{time-limit=20}"]
    assert main([*arguments, "--offload", "100GB/s"]) == 0
    moving = json.loads(capsys.readouterr().out)
    assert main(arguments) == 0
    assert moving["time_ns"] < json.loads(capsys.readouterr().out)["time_ns"]
    assert moving["status"] == "optimal" and moving["transfers"]["fetched_bytes"] > 0


def test_infeasible(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", instance, "--budget", str(2 * LAYER_BYTES), "--json"]) == 3
    printed, message = capsys.readouterr()
    assert json.loads(printed)["schedule"] is None
    assert "smallest budget it can meet is" in message
    minimum = message.split("smallest budget it can meet is ")[1].split()[0]
    assert main(["solve", instance, "--budget", minimum]) == 0


def test_certified_gap(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", instance, "--budget", "100%", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gap_percent"] == 0
    assert result["lower_bound_ns"] == result["time_ns"]
    assert main(["solve", instance, "--budget", "100%"]) == 0
    assert "gap       0.000 %: no schedule within the budget is quicker than 330 ns" in capsys.readouterr().out


def test_no_gap_without_a_bound(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", instance, "--budget", "80%", "--planner", "greedy"]) == 0
    assert "gap" not in capsys.readouterr().out
    assert main(["solve", instance, "--budget", "80%", "--planner", "greedy", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["lower_bound_ns"], result["gap_percent"]) == (None, None)


def test_smallest_budget(instance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "schedule.json"
    assert main(["solve", instance, "--min-peak", "--json", "-o", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == MIN_PEAK_KEYS
    assert _replay(chain_dag(), result["schedule"]) == (result["minimum_bytes"], result["time_ns"])
    assert result["lower_bound_bytes"] <= result["minimum_bytes"] < result["unconstrained_peak_bytes"]
    graph, costs = load_instance(instance)
    schedule = schedule_from_json(read_json(out))
    assert simulate(graph, costs, schedule).peak_bytes == result["minimum_bytes"]
    assert main(["solve", instance, "--budget", str(result["minimum_bytes"])]) == 0
    assert main(["solve", instance, "--budget", str(result["lower_bound_bytes"] - 1)]) == 3


def test_smallest_budget_of_a_planner(instance: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", instance, "--min-peak", "--planner", "keep-all"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("smallest budget reached by keep-all in ")
    assert printed.splitlines()[1:] == [
        "  budget    6.8 KiB (7000 bytes), 100.0 % of the peak",
        "  bound     2.9 KiB (3000 bytes): no schedule has a lower peak",
        "  gap       133.333 %",
        "  overhead  0.000 % at that budget",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json", "--budget", "1GiB"], "cannot read"),
        (["{instance}", "--budget", "12 apples"], "not a budget"),
        (["{instance}", "--budget", "0"], "not positive"),
        (
            ["{instance}", "--budget", "1GiB", "--offload", "1GB/s", "--offload-budget="],
            "is not a budget of the second",
        ),
        (["{instance}", "--budget", "40%", "--planner", "magic"], "no planner is named"),
        (["{instance}", "--budget", "40%", "--planner", "auto{effort=99}"], "effort"),
        (["{instance}", "--budget", "40%", "--offload", "16GB"], "'16GB' is not a bandwidth"),
        (["{instance}", "--budget", "40%", "--offload", "0GB/s"], "not positive"),
        (["{instance}", "--budget", "40%", "--offload", "1GB/s,2GB/s,3GB/s"], "has 3 bandwidths; give one"),
        (["{instance}", "--budget", "40%", "--offload", "1GB/s", "--offload-latency", "-1"], "-1 us, but goes from 0"),
        (["{instance}", "--budget", "40%", "--offload", "1GB/s", "--offload-budget", "50%"], "50%"),
        (["{instance}", "--budget", "40%", "--offload-budget", "1GiB"], "need --offload"),
    ],
)
def test_bad_input(instance: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", *(argument.replace("{instance}", instance) for argument in arguments)]) == 2
    printed, error = capsys.readouterr()
    assert message in error
    assert printed == ""


@pytest.mark.parametrize("content", ["{}", '{"format": "lowtide-dag/1", "name": 3}'])
def test_which_file_is_no_graph(
    instance: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text(content)
    for arguments in (["solve", str(wrong), "--budget", "50%"], ["compare", instance, str(wrong), "--budgets", "50%"]):
        assert main(arguments) == 2
        assert f"lowtide: {wrong}: " in capsys.readouterr().err


def test_bad_usage(instance: str) -> None:
    both = ["solve", instance, "--budget", "50%", "--min-peak"]
    for arguments in ([], ["solve"], ["solve", instance], both, ["compare", instance], ["frobnicate"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def _replay(dag: dict[str, object], schedule: list[list[object]]) -> tuple[int, int]:
    """Peak and time of a schedule under the rules of ``lowtide-dag/1``, without this package."""
    ops = dag["ops"]
    assert isinstance(ops, list)
    live: set[int] = set()
    peak = time_ns = 0
    for kind, number in schedule:
        assert isinstance(number, int)
        if kind == "free":
            live.remove(number)
            continue
        op = ops[number]
        assert set(op["inputs"]) <= live
        live.add(number)
        peak = max(peak, sum(ops[i]["bytes"] for i in live) + op["workspace_bytes"])
        time_ns += op["time_ns"]
    return peak, time_ns
