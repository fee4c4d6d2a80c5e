"""``lowtide-trace/1``: JSON lines, compressed where the file's name ends in ``.gz``; the first line describes the run."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from lowtide.errors import LowtideError
from lowtide.trace.checker import Checker
from lowtide.trace.model import Constant, Created, Event, OperatorCall, Pin, Release, Trace
from lowtide.trace.published import read_published

TRACE_FORMAT = "lowtide-trace/1"
_LARGEST = 2**50


class TraceWriter:
    """Writes a trace as its program runs, a line per event. Numbers of tensors are the caller's, each used once."""

    def __init__(self, path: str | Path, *, name: str = "", device: str = "", budget_bytes: int | None = None) -> None:
        """Raises ``LowtideError`` where the file cannot be written."""
        try:
            self._file = _open(path, "wt")
        except OSError as error:
            raise LowtideError(f"cannot write {path}: {error.strerror or error}.") from error
        head = {"format": TRACE_FORMAT, "name": name, "device": device, "budget_bytes": budget_bytes}
        self._file.write(json.dumps(head) + "\n")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closing twice does no harm."""
        self._file.close()

    def constant(self, tensor: int, size: int) -> None:
        self._file.write(f'{{"constant":{tensor},"bytes":{size}}}\n')

    def call(
        self,
        name: str,
        time_ns: int,
        reads: Iterable[int],
        creates: Iterable[tuple[int, int]] = (),
        *,
        aliases: Iterable[tuple[int, int]] = (),
        writes: Iterable[int] = (),
        workspace_bytes: int = 0,
        random: bool = False,
        once: bool = False,
    ) -> None:
        """``creates``: (tensor, bytes); ``aliases``: (tensor, the one of ``reads`` with which it shares its storage)."""
        made = [*([t, size] for t, size in creates), *([t, 0, of] for t, of in aliases)]
        line = f'{{"call":{json.dumps(name)},"time_ns":{time_ns},"reads":{[*reads]},"creates":{made}'
        if written := [*writes]:
            line += f',"writes":{written}'
        if workspace_bytes:
            line += f',"workspace_bytes":{workspace_bytes}'
        if random or once:
            line += f',"flags":{json.dumps(["random"] * random + ["once"] * once)}'
        self._file.write(line + "}\n")

    def release(self, tensor: int) -> None:
        self._file.write(f'{{"release":{tensor}}}\n')

    def pin(self, tensor: int) -> None:
        self._file.write(f'{{"pin":{tensor}}}\n')

    def backward(self) -> None:
        """The backward pass begins."""
        self._file.write('{"backward":true}\n')


def write_trace(trace: Trace, path: str | Path) -> None:
    """Raises ``LowtideError`` where the file cannot be written."""
    calls = 0
    with TraceWriter(path, name=trace.name, device=trace.device, budget_bytes=trace.budget_bytes) as writer:
        for event in trace.events:
            if isinstance(event, OperatorCall):
                if calls == trace.forward_calls:
                    writer.backward()
                calls += 1
            _write(writer, event)
        if calls == trace.forward_calls:
            writer.backward()


def _write(writer: TraceWriter, event: Event) -> None:
    match event:
        case Constant():
            writer.constant(event.tensor, event.bytes)
        case Release():
            writer.release(event.tensor)
        case Pin():
            writer.pin(event.tensor)
        case OperatorCall():
            writer.call(
                event.name,
                event.time_ns,
                event.reads,
                [(created.tensor, created.bytes) for created in event.creates if created.alias_of is None],
                aliases=[(c.tensor, c.alias_of) for c in event.creates if c.alias_of is not None],
                writes=event.writes,
                workspace_bytes=event.workspace_bytes,
                random=event.random,
                once=event.once,
            )


def read_trace(path: str | Path) -> Trace:
    """A ``lowtide-trace/1``, or a log as published with DTR. Raises ``LowtideError`` naming the line that is wrong."""
    try:
        with _open(path, "rt") as file:
            first = file.readline()
            lines = itertools.chain([first], file)
            head = _object(first, f"{path}, line 1")
            if "INSTRUCTION" in head:
                return read_published(lines, Path(path).name.removesuffix(".gz").removesuffix(".log"))
            if head.get("format") != TRACE_FORMAT:
                found = head.get("format")
                raise LowtideError(f"{path}: expected format {TRACE_FORMAT!r} or a log of DTR, found {found!r}.")
            return _Reader(str(path)).read(lines)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LowtideError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error


def _open(path: str | Path, mode: str) -> IO[str]:
    opener: Callable[..., Any] = gzip.open if str(path).endswith(".gz") else open
    return cast("IO[str]", opener(path, mode, encoding="utf-8"))


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LowtideError(f"{where}: not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise LowtideError(f"{where}: a JSON {type(found).__name__}, not an object.")
    return found


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = 0
        self.forward_calls: int | None = None
        self.checker = Checker()

    def read(self, lines: Iterable[str]) -> Trace:
        numbered = enumerate(lines, 1)
        head = _Fields(_object(next(numbered)[1], f"{self.path}, line 1"))
        try:
            name, device = head.text("name"), head.text("device")
            budget = None if head.data.get("budget_bytes") is None else head.count("budget_bytes")
        except LowtideError as error:
            raise LowtideError(f"{self.path}, line 1: {error}.") from error
        events = tuple(self._events(numbered))
        return Trace(events, name, device, budget, self.forward_calls)

    def _events(self, numbered: Iterator[tuple[int, str]]) -> Iterator[Event]:
        for number, line in numbered:
            where = f"{self.path}, line {number}"
            fields = _Fields(_object(line, where))
            try:
                event = self._event(fields)
                if event is not None:
                    self.checker.step(event)
                    yield event
            except LowtideError as error:
                raise LowtideError(f"{where}: {error}.") from error

    def _event(self, fields: _Fields) -> Event | None:
        kinds = [kind for kind in _EVENTS if kind in fields.data]
        if "backward" in fields.data:
            self.forward_calls = self.calls
            return None
        if len(kinds) != 1:
            raise LowtideError(f"not an event; one of {', '.join(_EVENTS)} says which it is")
        self.calls += kinds == ["call"]
        return _EVENTS[kinds[0]](fields)


class _Fields:
    """The values of a line, each checked."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def text(self, key: str) -> str:
        found = self.data.get(key, "")
        if not isinstance(found, str):
            raise LowtideError(f"{key} is {found!r}, not a string")
        return found

    def count(self, key: str, default: int | None = None) -> int:
        if key not in self.data and default is None:
            raise LowtideError(f"{key} is missing")
        return _count(self.data.get(key, default), key)

    def numbers(self, key: str) -> tuple[int, ...]:
        found = self.data.get(key, [])
        if not isinstance(found, list):
            raise LowtideError(f"{key} is {found!r}, not a list")
        return tuple(_count(number, key) for number in found)

    def created(self) -> tuple[Created, ...]:
        found = self.data.get("creates", [])
        if not isinstance(found, list) or not all(isinstance(row, list) and len(row) in (2, 3) for row in found):
            raise LowtideError("creates is not a list of [tensor, bytes] and [tensor, 0, alias of]")
        return tuple(Created(*(_count(number, "creates") for number in row)) for row in found)

    def flags(self) -> dict[str, bool]:
        found = self.data.get("flags", [])
        if not isinstance(found, list) or any(flag not in ("random", "once") for flag in found):
            raise LowtideError(f"flags is {found!r}; known are random and once")
        return dict.fromkeys(found, True)


def _count(number: Any, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _LARGEST:
        raise LowtideError(f"{what}: {number!r} is not a whole number from 0 to {_LARGEST}")
    return number


def _call(fields: _Fields) -> OperatorCall:
    return OperatorCall(
        fields.text("call"),
        fields.count("time_ns"),
        fields.numbers("reads"),
        fields.created(),
        fields.numbers("writes"),
        fields.count("workspace_bytes", 0),
        **fields.flags(),
    )


_EVENTS: dict[str, Callable[[_Fields], Event]] = {
    "constant": lambda fields: Constant(fields.count("constant"), fields.count("bytes")),
    "call": _call,
    "release": lambda fields: Release(fields.count("release")),
    "pin": lambda fields: Pin(fields.count("pin")),
}
