"""Text forms of graphs and schedules, for reading, diffing and golden tests. ``parse(format(x)) == x``.

Grammar of a graph, one item per line::

    graph    ::= "graph" string "fixed_bytes=" int
                 ["costs" "device=" string "rng_state_bytes=" int]
                 storage* ("value" value)*
                 "inputs" ref* "forward_outputs" ref* "outputs" ref*
                 "forward:" op* "backward:" op*
    storage  ::= "storage" "s"int ("external" | "op=" int) ["bytes=" int]
    op       ::= [value ("," value)*] "=" string "(" [ref ("," ref)*] ")" attribute*     its id is its position
    value    ::= ref ":s"int string type
    type     ::= word? "[" [int ("," int)*] "]"
    attribute::= "name=" string | "random" | "effect" | "collective" | "module=" string | "source=" string
                 | "time_ns=" int | "workspace_bytes=" int
    ref      ::= "%"int
    string   ::= word | a JSON string

The numbers of ``costs`` are there exactly where the ``costs`` line is. ``value`` lines are the values that no op returns.

Grammar of a schedule, one item per line::

    schedule ::= step* "|" step*
    step     ::= "compute" int | "free s"int | "save_rng" int | "restore_rng" int

In both, empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.graph import Graph, Op, Storage, Value
from lowtide.ir.schedule import Compute, Free, RestoreRng, SaveRng, Schedule, Step
from lowtide.ir.serial import GRAPH_FORMAT, graph_from_json

_WORD = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_INTEGER = re.compile(r"\d+", re.ASCII)
_REF = re.compile(r"%(\d+)", re.ASCII)
_STORAGE = re.compile(r"s(\d+)", re.ASCII)
_FLAGS = ("random", "effect", "collective")
_TEXTS = ("name", "module", "source")
_NUMBERS = ("time_ns", "workspace_bytes")
_LISTS = ("inputs", "forward_outputs", "outputs")
_STEP = re.compile(r"(compute|save_rng|restore_rng) (\d+)|free s(\d+)", re.ASCII)


def format_graph(graph: Graph, costs: Costs | None = None) -> str:
    """The text of ``graph``, with the numbers of ``costs`` where given."""
    lines = [f"graph {_quoted(graph.name)} fixed_bytes={graph.fixed_bytes}"]
    if costs is not None:
        lines.append(f"costs device={_quoted(costs.device)} rng_state_bytes={costs.rng_state_bytes}")
    lines += [_format_storage(storage, costs) for storage in graph.storages]
    lines += [f"value {_format_value(value)}" for value in graph.values if value.producer is None]
    lines += [" ".join((name, *(f"%{value}" for value in getattr(graph, name)))) for name in _LISTS]
    ops = [_format_op(graph, op, costs) for op in graph.ops]
    lines += ["forward:", *ops[: graph.forward_ops], "backward:", *ops[graph.forward_ops :]]
    return "\n".join(lines) + "\n"


def _format_storage(storage: Storage, costs: Costs | None) -> str:
    base = "external" if storage.base is None else f"op={storage.base}"
    size = "" if costs is None else f" bytes={costs.storage_bytes[storage.id]}"
    return f"storage s{storage.id} {base}{size}"


def _format_value(value: Value) -> str:
    shape = ",".join(map(str, value.shape))
    return f"%{value.id}:s{value.storage} {_quoted(value.name)} {value.dtype}[{shape}]"


def _format_op(graph: Graph, op: Op, costs: Costs | None) -> str:
    outputs = ", ".join(_format_value(graph.values[value]) for value in op.outputs)
    inputs = ", ".join(f"%{value}" for value in op.inputs)
    parts = [f"{outputs} = {_quoted(op.target)}({inputs})".lstrip(), f"name={_quoted(op.name)}"]
    parts += [flag for flag in _FLAGS if getattr(op, flag)]
    parts += [f"{key}={_quoted(text)}" for key in ("module", "source") if (text := getattr(op, key))]
    if costs is not None:
        parts += [f"time_ns={costs.time_ns[op.id]}", f"workspace_bytes={costs.workspace_bytes[op.id]}"]
    return " ".join(parts)


def _quoted(text: str) -> str:
    return text if _WORD.fullmatch(text) else json.dumps(text)


def parse_graph(text: str) -> tuple[Graph, Costs | None]:
    """Inverse of ``format_graph``. Raises ``PlanError`` naming the line that is wrong."""
    parser = _GraphParser()
    for number, line in _lines(text):
        parser.line(_Cursor(line, number))
    graph, costs = graph_from_json(parser.object())
    return graph, costs if parser.priced else None


class _GraphParser:
    """Collects the lines into a ``lowtide-graph/1`` object, whose reader does the validation."""

    def __init__(self) -> None:
        self.priced = False
        self.section = ""
        self.data: dict[str, Any] = {"format": GRAPH_FORMAT, "device": "", "rng_state_bytes": 0}
        self.storages: list[dict[str, Any]] = []
        self.values: dict[int, dict[str, Any]] = {}
        self.ops: list[dict[str, Any]] = []

    def line(self, cursor: _Cursor) -> None:
        if self.section or cursor.line in ("forward:", "backward:"):
            self._body(cursor)
            return
        keyword = cursor.expect(_WORD, "a keyword")[0]
        if keyword == "graph":
            self.data |= {"name": cursor.string()} | cursor.attributes({"fixed_bytes": cursor.integer})
        elif keyword == "costs":
            self.priced = True
            self.data |= cursor.attributes({"device": cursor.string, "rng_state_bytes": cursor.integer})
        elif keyword == "storage":
            self._storage(cursor)
        elif keyword == "value":
            self._value(cursor, None)
        elif keyword in _LISTS:
            self.data[keyword] = list(cursor.refs(""))
        else:
            cursor.fail(f"unknown keyword {keyword!r}")
        cursor.end()

    def object(self) -> dict[str, Any]:
        missing = [key for key in ("name", "fixed_bytes", *_LISTS, "forward_ops") if key not in self.data]
        if missing:
            raise PlanError(f"the text of the graph lacks {', '.join(missing)}.")
        if sorted(self.values) != list(range(len(self.values))):
            raise PlanError("the values of the graph are not numbered from %0 without gaps.")
        values = [self.values[index] for index in range(len(self.values))]
        return self.data | {"storages": self.storages, "values": values, "ops": self.ops}

    def _body(self, cursor: _Cursor) -> None:
        if cursor.line == "forward:" and not self.section:
            self.section = "forward"
        elif cursor.line == "backward:" and self.section == "forward":
            self.section = "backward"
            self.data["forward_ops"] = len(self.ops)
        elif self.section:
            self._op(cursor)
        else:
            cursor.fail("'backward:' comes before 'forward:'")

    def _storage(self, cursor: _Cursor) -> None:
        if int(cursor.expect(_STORAGE, "a storage")[1]) != len(self.storages):
            cursor.fail(f"storage s{len(self.storages)} is due here")
        base = None if cursor.accept("external") else cursor.attribute("op")
        size = cursor.attribute("bytes") if self.priced else 0
        self.storages.append({"base": base, "bytes": size})

    def _value(self, cursor: _Cursor, producer: int | None) -> int:
        index = int(cursor.expect(_REF, "a value")[1])
        if index in self.values:
            cursor.fail(f"%{index} is defined twice")
        cursor.token(":")
        storage, name = int(cursor.expect(_STORAGE, "a storage")[1]), cursor.string()
        dtype = cursor.accept(_WORD)
        shape = cursor.shape()
        keys = ("name", "storage", "producer", "dtype", "shape")
        self.values[index] = dict(zip(keys, (name, storage, producer, dtype, shape), strict=True))
        return index

    def _op(self, cursor: _Cursor) -> None:
        outputs: list[int] = []
        while not cursor.accept("="):
            if outputs:
                cursor.token(",")
            outputs.append(self._value(cursor, len(self.ops)))
        op: dict[str, Any] = {"target": cursor.string(), "outputs": outputs, "module": "", "source": "", "name": ""}
        cursor.token("(")
        op["inputs"] = list(cursor.refs(","))
        cursor.token(")")
        numbers = dict.fromkeys(_NUMBERS, cursor.integer) if self.priced else {}
        found = cursor.attributes(dict.fromkeys(_TEXTS, cursor.string) | numbers, _FLAGS)
        op |= dict.fromkeys(_NUMBERS, 0) | found
        op["flags"] = [flag for flag in _FLAGS if op.pop(flag, False)]
        self.ops.append(op)
        cursor.end()


class _Cursor:
    """Reads one line from left to right; every error names the line."""

    def __init__(self, line: str, number: int) -> None:
        self.line = line
        self.number = number
        self.position = 0

    def fail(self, reason: str) -> None:
        raise PlanError(f"line {self.number}: {reason}: {self.line[:100]!r}")

    def accept(self, wanted: str | re.Pattern[str]) -> str:
        """The token if it is next, else nothing."""
        match = self._match(wanted)
        return match[0] if match else ""

    def expect(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        match = self._match(pattern)
        if match is None:
            raise PlanError(f"line {self.number}: expected {what} at {self.line[self.position :][:40]!r}")
        return match

    def token(self, wanted: str) -> None:
        self.expect(re.compile(re.escape(wanted)), repr(wanted))

    def string(self) -> str:
        quoted = self.accept(_STRING)
        if not quoted:
            return self.expect(_WORD, "a string")[0]
        try:
            return str(json.loads(quoted))
        except ValueError as error:
            raise PlanError(f"line {self.number}: {quoted} is not a JSON string") from error

    def integer(self) -> int:
        return int(self.expect(_INTEGER, "a number")[0])

    def attribute(self, key: str) -> int:
        self.token(f"{key}=")
        return self.integer()

    def attributes(self, readers: dict[str, Callable[[], Any]], flags: tuple[str, ...] = ()) -> dict[str, Any]:
        """``key=value`` pairs and flags up to the end of the line; the numbers among them are required."""
        found: dict[str, Any] = {}
        while key := self.accept(_WORD):
            if key in found or (key not in readers and key not in flags):
                self.fail(f"{key!r} is not expected here")
            if key in flags:
                found[key] = True
            else:
                self.token("=")
                found[key] = readers[key]()
        for key, reader in readers.items():
            if key not in found and reader == self.integer:
                self.fail(f"{key}= is missing")
        return found

    def refs(self, separator: str) -> Iterator[int]:
        while match := self._match(_REF):
            yield int(match[1])
            if separator and not self.accept(separator):
                return

    def shape(self) -> list[int]:
        self.token("[")
        sizes: list[int] = []
        while not self.accept("]"):
            if sizes:
                self.token(",")
            sizes.append(self.integer())
        return sizes

    def end(self) -> None:
        if self.line[self.position :].strip():
            self.fail(f"unexpected {self.line[self.position :].strip()[:40]!r}")

    def _match(self, wanted: str | re.Pattern[str]) -> re.Match[str] | None:
        while self.line[self.position : self.position + 1] == " ":
            self.position += 1
        pattern = re.compile(re.escape(wanted)) if isinstance(wanted, str) else wanted
        match = pattern.match(self.line, self.position)
        if match:
            self.position = match.end()
        return match


def format_schedule(schedule: Schedule) -> str:
    """The text of ``schedule``, a step per line."""
    lines = [_format_step(step) for step in schedule.steps]
    lines.insert(schedule.boundary, "|")
    return "\n".join(lines) + "\n"


def _format_step(step: Step) -> str:
    match step:
        case Compute(op):
            return f"compute {op}"
        case Free(storage):
            return f"free s{storage}"
        case SaveRng(op):
            return f"save_rng {op}"
        case RestoreRng(op):
            return f"restore_rng {op}"


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``. Raises ``PlanError`` naming the line that is wrong."""
    steps: list[Step] = []
    boundaries: list[int] = []
    for number, line in _lines(text):
        if line == "|":
            boundaries.append(len(steps))
        else:
            steps.append(_parse_step(line, number))
    if len(boundaries) != 1:
        raise PlanError(f"a schedule has one boundary line '|', this one has {len(boundaries)}.")
    return Schedule(tuple(steps), boundaries[0])


def _parse_step(line: str, number: int) -> Step:
    match = _STEP.fullmatch(line)
    if match is None:
        raise PlanError(
            f"line {number}: {line[:100]!r} is not a step; steps are compute, free, save_rng and restore_rng."
        )
    if match[3]:
        return Free(int(match[3]))
    kinds: dict[str, type[Compute] | type[SaveRng] | type[RestoreRng]] = {
        "compute": Compute,
        "save_rng": SaveRng,
        "restore_rng": RestoreRng,
    }
    return kinds[match[1]](int(match[2]))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped
