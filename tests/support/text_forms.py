"""Reads the text forms of graphs and schedules (``lowtide.ir.text``) back, to show that they tell all that there is: a cached
plan is found by the text of its graph."""

from __future__ import annotations

import json
import re
from typing import Any

from lowtide.ir import Costs, Graph, Schedule, graph_from_json, schedule_from_json

_STRING = r'[A-Za-z_][\w.]*|"(?:[^"\\]|\\.)*"'
_VALUE = rf"%(\d+):s(\d+) ({_STRING}) ((?:[A-Za-z_][\w.]*)?)\[([\d,]*)\]"
_OP = re.compile(rf"((?:{_VALUE}(?:, )?)*) ?= ({_STRING})\(([%\d, ]*)\)(.*)", re.ASCII)
_ATTRIBUTE = re.compile(rf"(\w+)(?:=((?:%\d+,?)+|\d+|{_STRING}))?", re.ASCII)
_LISTS = ("inputs", "forward_outputs", "outputs")
_FLAGS = ("random", "effect", "collective", "once")


def parse_graph(text: str) -> tuple[Graph, Costs | None]:
    """Inverse of ``format_graph``."""
    data: dict[str, Any] = {"format": "lowtide-graph/2", "device": "", "rng_state_bytes": 0, "storages": [], "ops": []}
    values: dict[int, dict[str, Any]] = {}
    for line in text.splitlines():
        keyword, _, rest = line.partition(" ")
        if keyword in ("graph", "costs", "second_memory"):
            data |= _head(keyword, rest)
        elif keyword == "storage":
            words = dict(word.partition("=")[::2] for word in rest.split())
            base = int(words["op"]) if "op" in words else None
            data["storages"].append({"base": base, "bytes": int(words.get("bytes", 0))})
        elif keyword == "value":
            values |= _values(rest, None)
        elif keyword in _LISTS:
            data[keyword] = _numbers(rest)
        elif line == "backward:":
            data["forward_ops"] = len(data["ops"])
        elif line != "forward:":
            data["ops"].append(_op(line, len(data["ops"]), values))
    data["values"] = [values[index] for index in range(len(values))]
    graph, costs = graph_from_json(data)
    return graph, costs if "\ncosts " in text else None


def _head(keyword: str, rest: str) -> dict[str, Any]:
    found = dict(_ATTRIBUTE.findall(rest))
    if keyword == "costs":
        beside = "collectives_beside" in found
        numbers = {"device": _unquoted(found["device"]), "rng_state_bytes": int(found["rng_state_bytes"])}
        return {**numbers, "collectives_beside": beside}
    match = re.match(_STRING, rest, re.ASCII)
    assert match is not None
    name, facts = {"name": _unquoted(match[0])}, dict(re.findall(r" (\w+)=(\d+)", rest[match.end() :]))
    numbers = {key: int(number) for key, number in facts.items()}
    if keyword == "graph":
        return name | numbers
    return {keyword: name | numbers | {"shared": bool(numbers["shared"])}}


def _values(text: str, producer: int | None) -> dict[int, dict[str, Any]]:
    return {
        int(index): {
            "storage": int(storage), "name": _unquoted(name), "dtype": dtype, "shape": _numbers(shape), "producer": producer,
        }
        for index, storage, name, dtype, shape in re.findall(_VALUE, text, re.ASCII)
    }  # fmt: skip


def _op(line: str, number: int, values: dict[int, dict[str, Any]]) -> dict[str, Any]:
    match = _OP.fullmatch(line)
    assert match is not None, line
    made, (target, read, rest) = _values(match[1], number), match.groups()[-3:]
    values |= made
    op: dict[str, Any] = {"target": _unquoted(target), "inputs": _numbers(read), "outputs": [*made], "time_ns": 0}
    found = dict(_ATTRIBUTE.findall(rest))
    op["flags"] = [flag for flag in _FLAGS if flag in found]
    for key, text in found.items():
        if text.startswith("%"):
            op[key] = _numbers(text)
        elif text:
            op[key] = int(text) if text.isdigit() else _unquoted(text)
    return op


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``."""
    lines = text.splitlines()
    boundary = lines.index("|")
    steps = [[line.split()[0], *_numbers(line)] for line in lines[:boundary] + lines[boundary + 1 :]]
    return schedule_from_json({"format": "lowtide-schedule/2", "steps": steps, "boundary": boundary})


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text, re.ASCII)]


def _unquoted(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text
