"""``lowtide place`` and ``lowtide solve --layout``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lowtide.cli.main import main
from lowtide.place import fault, read_buffers
from tests.place.instances import Row, filled_rectangle
from tests.support.chains import LAYER_BYTES, chain_dag


def _file(folder: Path, rows: list[Row]) -> str:
    path = folder / "buffers.csv"
    lines = [f"{i},{lower},{upper},{size}" for i, (lower, upper, size) in enumerate(rows)]
    path.write_text("\n".join(["id,lower,upper,size", *lines]) + "\n")
    return str(path)


def test_a_placement_within_a_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = _file(tmp_path, filled_rectangle(0, 60)), tmp_path / "placed.csv"
    assert main(["place", path, "--capacity", "4KiB", "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith("optimal: 60 buffers in ")
    _, buffers, offsets = read_buffers(out)
    assert offsets is not None
    assert fault(buffers, offsets) is None
    assert buffers.reserved_bytes(offsets) == 4096
    assert main(["place", str(out), "--json", "--seed", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["offsets"].values()) == offsets.tolist()
    assert (result["status"], result["reserved_bytes"], result["gap_percent"]) == ("optimal", 4096, 0.0)


def test_without_a_capacity_it_places_as_low_as_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _file(tmp_path, [(0, 2, 3), (1, 3, 4), (2, 4, 5)])
    assert main(["place", path, "--align", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["capacity_bytes"] is None
    assert (result["reserved_bytes"], result["lower_bound_bytes"]) == (12, 12)
    assert all(offset % 4 == 0 for offset in result["offsets"].values())


@pytest.mark.parametrize(
    ("capacity", "options", "said"),
    [
        ("4095", [], "is proven not to fit 4095 bytes: 4096 bytes are live at one time; the lowest placement"),
        ("20", [], "alone takes up "),
        ("4096", ["--time", "1e-6"], "was not made to fit 4096 bytes: none was found in "),
    ],
)
def test_no_fit_is_exit_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], capacity: str, options: list[str], said: str
) -> None:
    path, out = _file(tmp_path, filled_rectangle(2, 250)), tmp_path / "placed.csv"
    assert main(["place", path, "--capacity", capacity, "-o", str(out), *options]) == 3
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        ([(3, 3, 1)], [], "buffer 0 lives from 3 to before 3"),
        ([(0, 1, 1)], ["--align", "0"], "the alignment is 0 bytes"),
        ([(0, 1, 1)], ["--time", "0"], "--time is 0 seconds"),
        ([(0, 1, 1)], ["--capacity", "-5"], "capacity"),
        ([(0, 1, 1)], ["--capacity", "much"], "'much' is not a capacity"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[Row], options: list[str], said: str
) -> None:
    assert main(["place", _file(tmp_path, rows), *options]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1


def test_the_addresses_of_a_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = chain_dag()
    path = tmp_path / "chain.json"
    path.write_text(json.dumps(data))
    command = ["solve", str(path), "--budget", "60%", "--planner", "greedy", "--layout"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    computes = [op for kind, op in result["schedule"] if kind == "compute"]
    assert len(result["offsets"]) == len(computes) > len(data["ops"])
    offsets, at = iter(result["offsets"]), dict[int, int]()
    for kind, op in result["schedule"]:
        if kind == "free":
            del at[op]
            continue
        start, size = next(offsets), data["ops"][op]["bytes"]
        assert start + size <= result["reserved_bytes"]
        assert all(start + size <= other or other + data["ops"][i]["bytes"] <= start for i, other in at.items())
        at[op] = start
    assert result["peak_bytes"] <= result["reserved_bytes"] <= 1.01 * result["peak_bytes"]
    assert result["reserved_bytes"] <= result["budget_bytes"]
    assert result["counted_overhead_percent"] <= result["overhead_percent"]
    for kind in ("native", "expandable"):
        cuda = result["cuda"][kind]
        assert result["peak_bytes"] <= cuda["smallest_device_bytes"] <= cuda["reserved_bytes"] == 2 << 20  # one segment
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "  reserved " in printed
    assert "  CUDA, expandable  2.0 MiB reserved" in printed
    assert main(["solve", str(path), "--min-peak", "--planner", "greedy", "--layout", "--align", "512", "--json"]) == 0
    assert all(offset % 512 == 0 for offset in json.loads(capsys.readouterr().out)["offsets"])


def test_addresses_over_the_budget_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors of 1000 bytes at multiples of 1024, in a budget that is full of them. Nothing is written."""
    path, out = tmp_path / "chain.json", tmp_path / "schedule.json"
    path.write_text(json.dumps(chain_dag()))
    assert main(["solve", str(path), "--min-peak", "--planner", "greedy", "--json"]) == 0
    least = json.loads(capsys.readouterr().out)["minimum_bytes"]
    command = ["solve", str(path), "--budget", str(least), "--planner", "greedy"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--layout", "--align", "1024", "--json", "-o", str(out)]) == 3
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert (result["status"], result["schedule"], result["peak_bytes"]) == ("unsolved", None, None)
    assert printed.err.count("\n") == 1
    reserved = least // LAYER_BYTES * 1024
    assert f"fit {least} bytes" in printed.err
    assert f"take up {reserved} bytes" in printed.err
    assert not out.exists()
    assert main([*command, "--layout", "--align", "1024"]) == 3
    assert capsys.readouterr().out == ""
    assert main([*command[:3], str(reserved), *command[4:], "--layout", "--align", "1024"]) == 0
