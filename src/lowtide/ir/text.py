"""Text form of graphs, for reading, diffing and golden tests. ``parse_graph(format_graph(x)) == x``.

Grammar, one item per line::

    graph    ::= "graph" string "fixed_bytes=" int
                 ["costs" "device=" string "rng_state_bytes=" int]
                 storage* ("value" value)*
                 "inputs" ref* "forward_outputs" ref* "outputs" ref*
                 "forward:" op* "backward:" op*
    storage  ::= "storage" "s"int ("external" | "op=" int) ["bytes=" int]
    op       ::= [value ("," value)*] "=" string "(" [ref ("," ref)*] ")" attribute*     its id is its position
    value    ::= ref ":s"int string type
    type     ::= word? "[" [int ("," int)*] "]"
    attribute::= "name=" string | "random" | "effect" | "collective" | "overwrites=" ref ("," ref)*
                 | "module=" string | "source=" string | "time_ns=" int | "workspace_bytes=" int
    ref      ::= "%"int
    string   ::= word | a JSON string

The numbers of ``costs`` are there exactly where the ``costs`` line is. ``value`` lines are the values that no op returns.

Empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lowtide.errors import PlanError
from lowtide.ir.costs import Costs
from lowtide.ir.cursor import STRING, WORD, Cursor, lines, numbers
from lowtide.ir.fields import GRAPH_FORMAT
from lowtide.ir.graph import Graph, Op, Storage, Value
from lowtide.ir.serial import graph_from_json

_FLAGS = ("random", "effect", "collective")
_TEXTS = ("name", "module", "source")
_NUMBERS = ("time_ns", "workspace_bytes")
_LISTS = ("inputs", "forward_outputs", "outputs")
_REFS = r"%\d+(?: *, *%\d+)*"
_VALUE = rf"%(\d+) *: *s(\d+) +({STRING}) *((?:{WORD})?) *\[((?:\d+(?:, *\d+)*)?)\]"


def format_graph(graph: Graph, costs: Costs | None = None) -> str:
    """The text of ``graph``, with the numbers of ``costs`` where given."""
    text = [f"graph {_quoted(graph.name)} fixed_bytes={graph.fixed_bytes}"]
    if costs is not None:
        text.append(f"costs device={_quoted(costs.device)} rng_state_bytes={costs.rng_state_bytes}")
    text += [_format_storage(storage, costs) for storage in graph.storages]
    text += [f"value {_format_value(value)}" for value in graph.values if value.producer is None]
    text += [" ".join((name, *(f"%{value}" for value in getattr(graph, name)))) for name in _LISTS]
    ops = [_format_op(graph, op, costs) for op in graph.ops]
    text += ["forward:", *ops[: graph.forward_ops], "backward:", *ops[graph.forward_ops :]]
    return "\n".join(text) + "\n"


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
    parts += [f"overwrites={','.join(f'%{value}' for value in op.overwrites)}"] if op.overwrites else []
    parts += [f"{key}={_quoted(text)}" for key in ("module", "source") if (text := getattr(op, key))]
    if costs is not None:
        parts += [f"time_ns={costs.time_ns[op.id]}", f"workspace_bytes={costs.workspace_bytes[op.id]}"]
    return " ".join(parts)


def _quoted(text: str) -> str:
    return text if re.fullmatch(WORD, text, re.ASCII) else json.dumps(text)


def parse_graph(text: str) -> tuple[Graph, Costs | None]:
    """Inverse of ``format_graph``. Raises ``PlanError`` naming the line that is wrong."""
    parser = _GraphParser()
    for number, line in lines(text):
        parser.line(Cursor(line, number))
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
        missing = [key for key in ("name", "fixed_bytes", *_LISTS, "forward_ops") if key not in self.data]
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
        elif keyword == "storage":
            if cursor.expect(r"s\d+", "a storage")[0] != f"s{len(self.storages)}":
                cursor.fail(f"storage s{len(self.storages)} is due here")
            base = cursor.expect(r"external|op=(\d+)", "'external' or 'op='")[1]
            size = cursor.expect(r"bytes=(\d+)", "'bytes='")[1] if self.priced else 0
            self.storages.append({"base": base and int(base), "bytes": int(size)})
        elif keyword == "value":
            self._value(cursor, None)
        elif keyword in _LISTS:
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
        flags = [flag for flag in _FLAGS if attributes.pop(flag, False)]
        self.ops.append({"name": "", "time_ns": 0, **op, **attributes, "flags": flags})
        cursor.end()

    def _attributes(self, cursor: Cursor) -> dict[str, Any]:
        """``key=value`` pairs and flags up to the end of the line; the numbers among them are required."""
        required = _NUMBERS if self.priced else ()
        found: dict[str, Any] = {}
        while match := cursor.accept(WORD):
            key = match[0]
            if key in found or key not in (*_FLAGS, *_TEXTS, *required, "overwrites"):
                cursor.fail(f"{key!r} is not expected here")
            if key in _FLAGS:
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
