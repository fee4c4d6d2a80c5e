"""Find modules that hand rows to others as data decide (routers), and these others (experts), whose programs differ in
every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.runtime.programs.entry import Entry


class Routing:
    """What the calls of one model showed. ``routers``: classes of modules that hand out rows."""

    def __init__(self) -> None:
        self.routers: set[type] = set()
        self._routed: set[Any] = set()  # kinds of calls of experts
        # Running modules that select rows: their class, and the shapes that they gave, by kind of call.
        self._under_way: list[tuple[type, dict[Any, Any]]] = []

    @contextlib.contextmanager
    def under_way(self, module: type, *, selects: bool) -> Iterator[None]:
        """A context in which a module of this class runs. ``selects``: whether it selects rows by data."""
        if not selects:
            yield
            return
        self._under_way.append((module, {}))
        try:
            yield
        finally:
            self._under_way.pop()

    def gives_other_rows(self, part: object, kind: Any, shapes: Sequence[torch.Size]) -> bool:
        """Whether a surrounding module that selects rows gives ``part`` another number of rows than another part in a
        call of this ``kind`` (which includes the list that both are in), or has done so before."""
        if not self._under_way:
            return False
        router, given = self._under_way[-1]
        other, known = given.setdefault(kind, (part, shapes))
        if other is not part and known != shapes and [one[1:] for one in known] == [one[1:] for one in shapes]:
            self._routed.add(kind)
            self.routers.add(router)
        return kind in self._routed

    def gives_other_numbers(
        self, module: nn.Module, inputs: list[torch.Tensor], states: int, like: Sequence[Entry]
    ) -> bool:
        """The same for numbers among the arguments of ``module`` that programs ``like`` its own have read. The first
        ``states`` ``inputs`` are the module's."""
        found = bool(self._under_way) and any(
            one.conditions[0].ask_other_numbers(inputs, module, states) for one in like
        )
        if found:
            self.routers.add(type(module))
        return found
