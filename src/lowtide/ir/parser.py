"""Reads the text forms of graphs and schedules (``ir.text``) back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.fields import GRAPH_FORMAT, SECOND
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule, Step
from lowtide.ir.serial import FLAGS, LISTS, STEPS, graph_from_json

WORD = r"[A-Za-z_][\w.]*"
STRING = rf'{WORD}|"(?:[^"\\]|\\.)*"'
_TEXTS = ("name", "module", "source")
_NUMBERS = ("time_ns", "workspace_bytes")
_REFS = r"%\d+(?: *, *%\d+)*"
_VALUE = rf"%(\d+) *: *s(\d+) +({STRING}) *((?:{WORD})?) *\[((?:\d+(?:, *\d+)*)?)\]"
_STEP = re.compile(
    r"(compute) (\d+)(?: into s(\d+))?|(free|offload|fetch) s(\d+)|(save_rng|restore_rng) (\d+)", re.ASCII
)


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, stripped, with their numbers."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text, re.ASCII)]


@dataclass(slots=True)
class Cursor:
    """Reads one line from left to right; every error names the line. Patterns are regular expressions of ASCII text."""

    line: str
    number: int
    position: int = 0

    def fail(self, reason: str) -> NoReturn:
        raise PlanError(f"line {self.number}: {reason}: {self.line[:100]!r}")

    def accept(self, pattern: str) -> re.Match[str] | None:
        """What matches ``pattern``, if it is next."""
        while self.line[self.position : self.position + 1] == " ":
            self.position += 1
        match = re.compile(pattern, re.ASCII).match(self.line, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def expect(self, pattern: str, what: str) -> re.Match[str]:
        match = self.accept(pattern)
        if match is None:
            raise PlanError(f"line {self.number}: expected {what} at {self.line[self.position :][:40]!r}")
        return match

    def unquoted(self, string: str) -> str:
        """A word, or what a JSON string says."""
        try:
            return str(json.loads(string)) if string.startswith('"') else string
        except ValueError as error:
            raise PlanError(f"line {self.number}: {string} is not a JSON string") from error

    def end(self) -> None:
        if rest := self.line[self.position :].strip():
            self.fail(f"unexpected {rest[:40]!r}")


def parse_graph(text: str) -> tuple[Graph, Costs | None]:
    """Inverse of ``format_graph``. Raises ``PlanError`` naming the line that is wrong."""
    parser = _GraphParser()
    for number, line in lines(text):
        parser.line(Cursor(line, number))
    graph, costs = graph_from_json(parser.object())
    return graph, costs if parser.priced else None


class _GraphParser:
    """Collects the lines into a ``lowtide-graph/2`` object, whose reader does the validation."""

    def __init__(self) -> None:
        self.priced = False
        self.section = ""
        self.data: dict[str, Any] = {"format": SECOND[GRAPH_FORMAT], "device": "", "rng_state_bytes": 0}
        self.storages: list[dict[str, Any]] = []
        self.values: dict[int, dict[str, Any]] = {}
        self.ops: list[dict[str, Any]] = []

    def line(self, cursor: Cursor) -> None:
        if cursor.line == "forward:" and not self.section:
            self.section = cursor.line
        elif cursor.line == "backward:" and self.section == "forward:":
            self.section = cursor.line
            self.data["forward_ops"] = len(self.ops)
        elif self.section:
            self._op(cursor)
        elif cursor.line == "backward:":
            cursor.fail("'backward:' comes before 'forward:'")
        else:
            self._head(cursor)
            cursor.end()

    def object(self) -> dict[str, Any]:
        missing = [key for key in ("name", "fixed_bytes", *LISTS, "forward_ops") if key not in self.data]
        if missing:
            raise PlanError(f"the text of the graph lacks {', '.join(missing)}.")
        if sorted(self.values) != list(range(len(self.values))):
            raise PlanError("the values of the graph are not numbered from %0 without gaps.")
        values = [self.values[index] for index in range(len(self.values))]
        return self.data | {"storages": self.storages, "values": values, "ops": self.ops}

    def _head(self, cursor: Cursor) -> None:
        keyword = cursor.expect(WORD, "a keyword")[0]
        if keyword == "graph":
            found = cursor.expect(rf"({STRING}) +fixed_bytes=(\d+)", "a name and 'fixed_bytes='")
            self.data |= {"name": cursor.unquoted(found[1]), "fixed_bytes": int(found[2])}
        elif keyword == "costs":
            self.priced = True
            found = cursor.expect(rf"device=({STRING}) +rng_state_bytes=(\d+)", "'device=' and 'rng_state_bytes='")
            self.data |= {"device": cursor.unquoted(found[1]), "rng_state_bytes": int(found[2])}
            self.data["collectives_beside"] = cursor.accept("collectives_beside") is not None
        elif keyword == "second_memory":
            found = cursor.expect(rf"({STRING})((?: +\w+=\d+)+)", "a name and fields of a second memory")
            facts = {key: int(fact) for key, fact in re.findall(r"(\w+)=(\d+)", found[2])}
            shared = {"shared": bool(facts["shared"])} if "shared" in facts else {}
            self.data[keyword] = {"name": cursor.unquoted(found[1]), **facts, **shared}
        elif keyword == "storage":
            if cursor.expect(r"s\d+", "a storage")[0] != f"s{len(self.storages)}":
                cursor.fail(f"storage s{len(self.storages)} is due here")
            base = cursor.expect(r"external|op=(\d+)", "'external' or 'op='")[1]
            size = cursor.expect(r"bytes=(\d+)", "'bytes='")[1] if self.priced else 0
            self.storages.append({"base": base and int(base), "bytes": int(size)})
        elif keyword == "value":
            self._value(cursor, None)
        elif keyword in LISTS:
            self.data[keyword] = numbers(cursor.expect(r"(%\d+ *)*", "values")[0])
        else:
            cursor.fail(f"unknown keyword {keyword!r}")

    def _value(self, cursor: Cursor, producer: int | None) -> int:
        found = cursor.expect(_VALUE, "a value")
        index, storage, name, dtype, shape = found.groups()
        if int(index) in self.values:
            cursor.fail(f"%{index} is defined twice")
        value = {"name": cursor.unquoted(name), "storage": int(storage), "producer": producer, "dtype": dtype}
        self.values[int(index)] = value | {"shape": numbers(shape)}
        return int(index)

    def _op(self, cursor: Cursor) -> None:
        outputs: list[int] = []
        while not cursor.accept("="):
            if outputs:
                cursor.expect(",", "','")
            outputs.append(self._value(cursor, len(self.ops)))
        found = cursor.expect(rf"({STRING}) *\( *((?:{_REFS})?) *\)", "an operator and the values that it reads")
        op = {"target": cursor.unquoted(found[1]), "inputs": numbers(found[2]), "outputs": outputs}
        attributes = self._attributes(cursor)
        flags = [flag for flag in FLAGS if attributes.pop(flag, False)]
        self.ops.append({"name": "", "time_ns": 0, **op, **attributes, "flags": flags})
        cursor.end()

    def _attributes(self, cursor: Cursor) -> dict[str, Any]:
        """``key=value`` pairs and flags up to the end of the line; the numbers among them are required."""
        required = _NUMBERS if self.priced else ()
        found: dict[str, Any] = {}
        while match := cursor.accept(WORD):
            key = match[0]
            if key in found or key not in (*FLAGS, *_TEXTS, *required, "overwrites"):
                cursor.fail(f"{key!r} is not expected here")
            if key in FLAGS:
                found[key] = True
            elif key in _TEXTS:
                found[key] = cursor.unquoted(cursor.expect(f"= *({STRING})", "'=' and a string")[1])
            elif key in required:
                found[key] = int(cursor.expect(r"= *(\d+)", "'=' and a number")[1])
            else:
                found[key] = numbers(cursor.expect(f"= *({_REFS})", "'=' and values")[1])
        for key in required:
            if key not in found:
                cursor.fail(f"{key}= is missing")
        return found


def parse_schedule(text: str) -> Schedule:
    """Inverse of ``format_schedule``. Raises ``PlanError`` naming the line that is wrong."""
    steps: list[Step] = []
    boundaries: list[int] = []
    for number, line in lines(text):
        if line == "|":
            boundaries.append(len(steps))
        elif match := _STEP.fullmatch(line):
            kind, *numbers = (part for part in match.groups() if part)
            steps.append(STEPS[kind](*map(int, numbers)))
        else:
            raise PlanError(f"line {number}: {line[:100]!r} is not a step; steps are {', '.join(STEPS)}.")
    if len(boundaries) != 1:
        raise PlanError(f"a schedule has one boundary line '|', this one has {len(boundaries)}.")
    return Schedule(tuple(steps), boundaries[0])
