"""Reading text forms line by line, with errors that name the line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from lowtide.errors import PlanError

WORD = r"[A-Za-z_][\w.]*"
STRING = rf'{WORD}|"(?:[^"\\]|\\.)*"'


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
