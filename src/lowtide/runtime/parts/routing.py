"""Modules that hand rows to others as data say, and the others: experts, whose programs are other ones in every call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.runtime.programs.entry import Entry


class Routing:
    """What is seen of it in calls of one model. ``routers``: classes of modules that were found to do so."""

    def __init__(self) -> None:
        self.routers: set[type] = set()
        self._routed: set[Any] = set()  # kinds of calls of experts
        # Classes of modules that select rows, and how many these gave to calls of a kind.
        self._under_way: list[tuple[type, dict[Any, Any]]] = []

    @contextlib.contextmanager
    def under_way(self, module: type, *, selects: bool) -> Iterator[None]:
        """Inside, code of a module of this class runs, which ``selects`` rows by data."""
        if not selects:
            yield
            return
        self._under_way.append((module, {}))
        try:
            yield
        finally:
            self._under_way.pop()

    def gives_other_rows(self, part: object, kind: Any, shapes: Sequence[torch.Size]) -> bool:
        """Whether a module around ``part`` that selects rows hands another number of them to it than to another one in a call
        of this ``kind``, which says in which list both are; or has done so."""
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
        """The same of numbers among the arguments of ``module``, which the programs of others ``like`` it have read of theirs.
        The first ``states`` of the ``inputs`` are its own."""
        found = bool(self._under_way) and any(
            one.conditions[0].ask_other_numbers(inputs, module, states) for one in like
        )
        if found:
            self.routers.add(type(module))
        return found
