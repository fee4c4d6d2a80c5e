"""``lowtide-trace/1`` files: JSON lines, compressed if the file's name ends in ``.gz``. The first line describes the
run."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, cast

from lowtide.errors import LowtideError
from lowtide.ir.fields import count, text
from lowtide.trace.checker import Checker
from lowtide.trace.model import Constant, Created, Event, OperatorCall, Pin, Release, Trace
from lowtide.trace.published import read_published

TRACE_FORMAT = "lowtide-trace/1"
_KINDS = ("constant", "call", "release", "pin")


class TraceWriter(contextlib.AbstractContextManager["TraceWriter"]):
    """Writes a trace while its program runs, one line per event. The caller numbers the tensors, and uses each number
    once."""

    def __init__(self, path: str | Path, *, name: str = "", device: str = "", budget_bytes: int | None = None) -> None:
        """Raises ``LowtideError`` if the file cannot be written."""
        try:
            self._file = _open(path, "wt")
        except OSError as error:
            raise LowtideError(f"cannot write {path}: {error.strerror or error}.") from error
        head = {"format": TRACE_FORMAT, "name": name, "device": device, "budget_bytes": budget_bytes}
        self._file.write(json.dumps(head) + "\n")

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """May be called twice."""
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
        """``creates``: (tensor, bytes). ``aliases``: (tensor, the one of ``reads`` whose storage it shares)."""
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
    """Raises ``LowtideError`` if the file cannot be written."""
    calls = 0
    with TraceWriter(path, name=trace.name, device=trace.device, budget_bytes=trace.budget_bytes) as writer:
        for event in trace.events:
            match event:
                case Constant(tensor, size):
                    writer.constant(tensor, size)
                case Release(tensor):
                    writer.release(tensor)
                case Pin(tensor):
                    writer.pin(tensor)
                case OperatorCall():
                    if calls == trace.forward_calls:
                        writer.backward()
                    calls += 1
                    _write_call(writer, event)
        if calls == trace.forward_calls:
            writer.backward()


def _write_call(writer: TraceWriter, call: OperatorCall) -> None:
    writer.call(
        call.name,
        call.time_ns,
        call.reads,
        [(created.tensor, created.bytes) for created in call.creates if created.alias_of is None],
        aliases=[(created.tensor, created.alias_of) for created in call.creates if created.alias_of is not None],
        writes=call.writes,
        workspace_bytes=call.workspace_bytes,
        random=call.random,
        once=call.once,
    )


def read_trace(path: str | Path) -> Trace:
    """Read a ``lowtide-trace/1`` file, or a log as published with DTR. Raises ``LowtideError`` that names the wrong
    line."""
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
            return _read(str(path), lines)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LowtideError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error


def _open(path: str | Path, mode: str) -> IO[str]:
    opener: Callable[..., Any] = gzip.open if str(path).endswith(".gz") else open
    return cast("IO[str]", opener(path, mode, encoding="utf-8-sig" if mode == "rt" else "utf-8"))


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LowtideError(f"{where}: not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise LowtideError(f"{where}: a JSON {type(found).__name__}, not an object.")
    return found


def _read(path: str, lines: Iterable[str]) -> Trace:
    checker, events, calls = Checker(), list[Event](), 0
    head: dict[str, Any] = {}
    forward_calls: int | None = None
    for number, line in enumerate(lines, 1):
        if line.isspace():
            continue
        where = f"{path}, line {number}"
        data = _object(line, where)
        try:
            if number == 1:
                head = {key: text(data.get(key, ""), key) for key in ("name", "device")}
                head["budget_bytes"] = None if data.get("budget_bytes") is None else _count(data, "budget_bytes")
            elif "backward" in data:
                forward_calls = calls
            else:
                events.append(_event(data))
                calls += isinstance(events[-1], OperatorCall)
                checker.step(events[-1])
        except LowtideError as error:
            raise LowtideError(f"{where}: {str(error).removesuffix('.')}.") from error
    return Trace(tuple(events), **head, forward_calls=forward_calls)


def _event(data: dict[str, Any]) -> Event:
    match [kind for kind in _KINDS if kind in data]:
        case ["constant"]:
            return Constant(_count(data, "constant"), _count(data, "bytes"))
        case ["release"]:
            return Release(_count(data, "release"))
        case ["pin"]:
            return Pin(_count(data, "pin"))
        case ["call"]:
            time_ns, workspace_bytes = _count(data, "time_ns"), _count(data, "workspace_bytes", 0)
            reads, writes = _numbers(data, "reads"), _numbers(data, "writes")
            return OperatorCall(
                text(data["call"], "call"), time_ns, reads, _created(data), writes, workspace_bytes, **_flags(data)
            )
    raise LowtideError(f"not an event; one of {', '.join(_KINDS)} says which it is.")


def _count(data: dict[str, Any], key: str, default: int | None = None) -> int:
    if key not in data and default is None:
        raise LowtideError(f"{key} is missing.")
    return count(data.get(key, default), key)


def _numbers(data: dict[str, Any], key: str) -> tuple[int, ...]:
    found = data.get(key, [])
    if not isinstance(found, list):
        raise LowtideError(f"{key} is {found!r}, not a list.")
    return tuple(count(number, key) for number in found)


def _created(data: dict[str, Any]) -> tuple[Created, ...]:
    found = data.get("creates", [])
    if not isinstance(found, list) or not all(isinstance(row, list) and len(row) in (2, 3) for row in found):
        raise LowtideError("creates is not a list of [tensor, bytes] and [tensor, 0, alias of].")
    return tuple(Created(*(count(number, "creates") for number in row)) for row in found)


def _flags(data: dict[str, Any]) -> dict[str, bool]:
    found = data.get("flags", [])
    if not isinstance(found, list) or any(flag not in ("random", "once") for flag in found):
        raise LowtideError(f"flags is {found!r}; known are random and once.")
    return dict.fromkeys(found, True)
