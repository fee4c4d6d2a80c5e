"""The logs published with Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021; uwsampl/dtr-prototype).

JSON lines, each an ``INSTRUCTION``: ``CONSTANT`` with its ``MEMORY``; ``CALL``, for each result ``MEMORY`` and ``ALIAS``
(the position of the argument it shares memory with, or -1); ``MUTATE``; ``COPY`` and ``COPY_FROM``, which give a tensor
another name; ``RELEASE`` of a name; ``ANNOTATE``. What comes before the annotation ``START`` does not belong to the program.

Names are resolved here: a tensor is released with its last name, and loses one that another tensor gets. An operator that
mutates is read as one that returns new tensors of the size of the whole storage, to which the names of the mutated ones
move, as in that project. What has a name at the end is the program's output.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from lowtide.errors import LowtideError, PlanError
from lowtide.ir.fields import count, text
from lowtide.trace.model import Constant, Created, Event, OperatorCall, Pin, Release, Trace


def read_published(lines: Iterable[str], name: str) -> Trace:
    """Raises ``LowtideError`` that names the wrong line."""
    return _Reader(name).read(lines)


class _Reader:
    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []
        self.named: dict[str, int] = {}
        self.names = list[int]()  # tensor -> number of its names
        self.bytes = list[int]()  # tensor -> bytes of its storage
        self.calls = 0
        self.forward_calls: int | None = None
        self.line = 0

    def read(self, lines: Iterable[str]) -> Trace:
        records = self._records(lines)
        for record in records:
            try:
                self._record(record, records)
            except PlanError as error:
                raise self._wrong(str(error).removesuffix(".")) from error
            except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
                raise self._wrong(f"{type(error).__name__}: {error}") from error
        held = dict.fromkeys(self.named.values())
        self.events += [Pin(tensor) for tensor in held]
        return Trace(tuple(self.events), self.name, forward_calls=self.forward_calls)

    def _wrong(self, what: str) -> LowtideError:
        return LowtideError(f"{self.name}, line {self.line}: {what}.")

    def _records(self, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        started = False
        for self.line, line in enumerate(lines, 1):
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise self._wrong(f"not JSON: {error}") from error
            if not isinstance(record, dict) or "INSTRUCTION" not in record:
                raise self._wrong("not an INSTRUCTION")
            if started:
                yield record
            started = started or record.get("ANNOTATION") == "START"

    def _record(self, record: dict[str, Any], rest: Iterator[dict[str, Any]]) -> None:
        instruction = record["INSTRUCTION"]
        if instruction == "CONSTANT":
            tensor = self._new(_whole(self._next(rest, "MEMORY", record["NAME"]), "MEMORY"))
            self.events.append(Constant(tensor, self.bytes[tensor]))
            self._name(record["NAME"], tensor)
        elif instruction == "CALL":
            self._call(record, rest)
        elif instruction == "MUTATE":
            self._mutate(record)
        elif instruction == "COPY":
            self._name(record["DST"], self.named[record["SRC"]])
        elif instruction == "COPY_FROM":
            if record["DST"] not in self.named:
                raise self._wrong(f"unknown name {record['DST']!r}")
            self._name(record["DST"], self.named[record["SRC"]])
        elif instruction == "RELEASE":
            if record["NAME"] in self.named:
                self._drop(record["NAME"])
        elif instruction == "ANNOTATE":
            if record["ANNOTATION"] == "BACKWARD" and self.forward_calls is None:
                self.forward_calls = self.calls
        else:
            raise self._wrong(f"unknown instruction {instruction!r}")

    def _next(self, rest: Iterator[dict[str, Any]], instruction: str, name: str) -> dict[str, Any]:
        record = next(rest, {})
        if record.get("INSTRUCTION") != instruction or record.get("NAME") != name:
            raise self._wrong(f"expected {instruction} of {name}")
        return record

    def _call(self, record: dict[str, Any], rest: Iterator[dict[str, Any]]) -> None:
        reads = tuple(self.named[name] for name in record["ARGS"])
        creates = []
        for name in record["RESULT"]:
            size = _whole(self._next(rest, "MEMORY", name), "MEMORY")
            alias = int(self._next(rest, "ALIAS", name)["ALIAS"])
            if alias < 0:
                creates.append(Created(self._new(size), size))
            else:
                base = reads[alias]
                creates.append(Created(self._new(self.bytes[base]), 0, base))
        self._add(record, reads, creates)
        for name, created in zip(record["RESULT"], creates, strict=True):
            self._name(name, created.tensor)

    def _mutate(self, record: dict[str, Any]) -> None:
        reads = tuple(self.named[name] for name in record["ARGS"])
        mutated = [record["ARGS"][position] for position in record["MUTATE"]]
        creates = []
        for name in mutated:
            size = self.bytes[self.named[name]]
            creates.append(Created(self._new(size), size))
        self._add(record, reads, creates)
        for name, created in zip(mutated, creates, strict=True):
            self._name(name, created.tensor)

    def _add(self, record: dict[str, Any], reads: tuple[int, ...], creates: list[Created]) -> None:
        self.events.append(OperatorCall(text(record["NAME"], "NAME"), _whole(record, "TIME"), reads, tuple(creates)))
        self.calls += 1

    def _new(self, size: int) -> int:
        self.names.append(0)
        self.bytes.append(size)
        return len(self.names) - 1

    def _name(self, name: str, tensor: int) -> None:
        """Give the name to the tensor, and take it from the tensor that had it before."""
        self.names[tensor] += 1
        if name in self.named:
            self._drop(name)
        self.named[name] = tensor

    def _drop(self, name: str) -> None:
        tensor = self.named.pop(name)
        self.names[tensor] -= 1
        if self.names[tensor] == 0:
            self.events.append(Release(tensor))


def _whole(record: dict[str, Any], key: str) -> int:
    """A number, which the logs store as text."""
    return count(int(record[key]), key)
