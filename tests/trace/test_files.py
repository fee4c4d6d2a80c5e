"""Traces as text and as files: what is written is read back, and every fault is named with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lowtide.errors import LowtideError
from lowtide.trace import Constant, Created, OperatorCall, Pin, Release, Trace, TraceWriter, read_trace, write_trace
from tests.support.traces import random_trace

HEAD = '{"format": "lowtide-trace/1"}\n'


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_what_is_written_is_read_back(name: str, tmp_path: Path) -> None:
    for seed in range(10):
        events = random_trace(seed).events
        calls = sum(isinstance(event, OperatorCall) for event in events)
        trace = Trace(events, 'a "name"', "a device", 1 << 30, (None, 0, calls // 2, calls)[seed % 4])
        write_trace(trace, tmp_path / name)
        assert read_trace(tmp_path / name) == trace


def test_a_file_whose_name_ends_in_gz_is_compressed(tmp_path: Path) -> None:
    for name, compressed in (("a.gz", True), ("a.jsonl", False)):
        write_trace(random_trace(1), tmp_path / name)
        assert ((tmp_path / name).read_bytes()[:2] == b"\x1f\x8b") == compressed


def test_the_writer_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with TraceWriter(path, name="run", budget_bytes=100) as writer:
        writer.constant(0, 64)
        writer.call("mm", 500, [0, 0], [(1, 32)], workspace_bytes=8)
        writer.backward()
        writer.call("view", 1, [1], aliases=[(2, 1)], random=True)
        writer.call("add_", 7, [2], writes=[2], once=True)
        writer.release(1)
        writer.pin(2)
    writer.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"format": "lowtide-trace/1", "name": "run", "device": "", "budget_bytes": 100},
        {"constant": 0, "bytes": 64},
        {"call": "mm", "time_ns": 500, "reads": [0, 0], "creates": [[1, 32]], "workspace_bytes": 8},
        {"backward": True},
        {"call": "view", "time_ns": 1, "reads": [1], "creates": [[2, 0, 1]], "flags": ["random"]},
        {"call": "add_", "time_ns": 7, "reads": [2], "creates": [], "writes": [2], "flags": ["once"]},
        {"release": 1},
        {"pin": 2},
    ]
    assert read_trace(path).forward_calls == 1


def test_text() -> None:
    events = (
        Constant(0, 64),
        OperatorCall("mm", 500, (0, 0), (Created(1, 32), Created(2, 0, 0)), workspace_bytes=8, random=True),
        OperatorCall("add_", 7, (1,), (), (1,), once=True),
        Release(1),
        Pin(2),
    )
    assert str(Trace(events, "run", "cpu", 100)) == (
        'trace "run" device="cpu" budget_bytes=100\n'
        "constant %0 bytes=64\n"
        "%1 32, %2 of %0 = mm(%0, %0) time_ns=500 workspace_bytes=8 random\n"
        "() = add_(%1) time_ns=7 writes=(%1) once\n"
        "release %1\n"
        "pin %2\n"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "line 1: not JSON"),
        ("[]\n", "line 1: a JSON list, not an object"),
        ('{"format": "lowtide-dag/1"}\n', "expected format 'lowtide-trace/1' or a log of DTR, found 'lowtide-dag/1'"),
        ('{"format": "lowtide-trace/1", "name": 3}\n', "line 1: name: 3 is not a string"),
        (HEAD + '{"release": 0}\n', "line 2: releases %0, which was never made"),
        (HEAD + '{"constant": 0, "bytes": 1}\n{"release": 0}\n{"pin": 0}\n', "line 4: pins %0, which was released"),
        (HEAD + '{"constant": 0, "bytes": 1}\n{"constant": 0, "bytes": 1}\n', "line 3: %0 is made a second time"),
        (HEAD + '{"constant": 0}\n', "line 2: bytes is missing"),
        (HEAD + '{"constant": 0, "bytes": -1}\n', "line 2: bytes: -1 is not a whole number"),
        (HEAD + '{"call": "x", "time_ns": 1.5}\n', "line 2: time_ns: 1.5 is not a whole number"),
        (HEAD + '{"call": "x", "time_ns": 1, "reads": 3}\n', "line 2: reads is 3, not a list"),
        (HEAD + '{"call": "x", "time_ns": 1, "creates": [[1]]}\n', "line 2: creates is not a list of"),
        (
            HEAD + '{"call": "x", "time_ns": 1, "flags": ["odd"]}\n',
            "line 2: flags is ['odd']; known are random and once",
        ),
        (HEAD + '{"call": "x", "time_ns": 1, "creates": [[1, 0, 0]]}\n', "line 2: x returns an alias of %0"),
        (HEAD + '{"freed": 0}\n', "line 2: not an event"),
        (HEAD + '{"pin": 0', "line 2: not JSON"),
    ],
)
def test_faults(lines: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(lines)
    with pytest.raises(LowtideError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert "run.jsonl" in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(LowtideError, match=r"cannot read .*No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(LowtideError, match=r"cannot write .*No such file"):
        TraceWriter(tmp_path / "missing" / "run.jsonl")
    (tmp_path / "plain.gz").write_text(HEAD)
    with pytest.raises(LowtideError, match=r"cannot read .*plain\.gz"):
        read_trace(tmp_path / "plain.gz")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(HEAD.encode() * 1000)[:-20])
    with pytest.raises(LowtideError, match=r"cut\.gz"):
        read_trace(tmp_path / "cut.gz")
