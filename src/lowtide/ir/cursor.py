"""Reading text forms line by line, with errors that name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.errors import PlanError

WORD = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
REF = re.compile(r"%(\d+)", re.ASCII)
STORAGE = re.compile(r"s(\d+)", re.ASCII)
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
INTEGER = re.compile(r"\d+", re.ASCII)


def lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines that say something, stripped, with their numbers."""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


class Cursor:
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
        quoted = self.accept(STRING)
        if not quoted:
            return self.expect(WORD, "a string")[0]
        try:
            return str(json.loads(quoted))
        except ValueError as error:
            raise PlanError(f"line {self.number}: {quoted} is not a JSON string") from error

    def integer(self) -> int:
        return int(self.expect(INTEGER, "a number")[0])

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

    def refs(self, separator: str) -> Iterator[int]:
        while match := self._match(REF):
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
