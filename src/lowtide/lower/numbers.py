"""Generates code that computes the numbers that change from call to call (``program.scalars``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lowtide.program import Program
from lowtide.program.scalars import Source, result_of


class Numbers:
    """The changing numbers of one program. ``constant`` returns an object's name in generated code."""

    def __init__(self, program: Program, constant: Callable[[Any], str]) -> None:
        self._first = len(program.inputs)  # behind the flat inputs
        self._constant = constant
        self._names: dict[Source, str] = {}

    def name(self, source: Source) -> str:
        return self._names.setdefault(source, f"n{len(self._names)}")

    def lines(self) -> Iterator[str]:
        """Yield the first lines of the generated function, which compute the numbers."""
        for source, name in self._names.items():
            given = f"inputs[{self._first + source.number}].item()"
            computed = f"{self._constant(functools.partial(result_of, source.operations))}({given})"
            yield f"{name} = {computed if source.operations else given}"
