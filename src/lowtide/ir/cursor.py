"""Reading text forms line by line, with errors that name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from lowtide.errors import PlanError

WORD = r"[A-Za-z_][\w.]*"
STORAGE = r"s\d+"
_REF = r"%\d+"
_STRING = r'"(?:[^"\\]|\\.)*"'


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, stripped, with their numbers."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


@dataclass(slots=True)
class Cursor:
    """Reads one line from left to right; every error names the line. Patterns are regular expressions of ASCII text."""

    line: str
    number: int
    position: int = 0

    def fail(self, reason: str) -> NoReturn:
        raise PlanError(f"line {self.number}: {reason}: {self.line[:100]!r}")

    def accept(self, pattern: str) -> str:
        """What matches ``pattern``, if it is next, else nothing."""
        match = re.compile(f" *({pattern})", re.ASCII).match(self.line, self.position)
        if match is None:
            return ""
        self.position = match.end()
        return match[1]

    def expect(self, pattern: str, what: str) -> str:
        found = self.accept(pattern)
        if not found:
            raise PlanError(f"line {self.number}: expected {what} at {self.line[self.position :].lstrip()[:40]!r}")
        return found

    def token(self, wanted: str) -> None:
        self.expect(re.escape(wanted), repr(wanted))

    def string(self) -> str:
        found = self.expect(f"{WORD}|{_STRING}", "a string")
        try:
            return str(json.loads(found)) if found.startswith('"') else found
        except ValueError as error:
            raise PlanError(f"line {self.number}: {found} is not a JSON string") from error

    def integer(self) -> int:
        return int(self.expect(r"\d+", "a number"))

    def attribute(self, key: str) -> int:
        self.token(f"{key}=")
        return self.integer()

    def attributes(self, readers: dict[str, Callable[[], Any]], flags: tuple[str, ...] = ()) -> dict[str, Any]:
        """``key=value`` pairs and flags up to the end of the line; the numbers among them are required."""
        found: dict[str, Any] = {}
        while key := self.accept(WORD):
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

    def ref(self) -> int:
        return int(self.expect(_REF, "a value")[1:])

    def refs(self, separator: str = "") -> list[int]:
        return _numbers(self.accept(f"{_REF}(?: *{separator} *{_REF})*"))

    def shape(self) -> list[int]:
        return _numbers(self.expect(r"\[(?:\d+(?:, *\d+)*)?\]", "a shape"))

    def end(self) -> None:
        if rest := self.line[self.position :].strip():
            self.fail(f"unexpected {rest[:40]!r}")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text, re.ASCII)]
