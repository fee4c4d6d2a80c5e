"""What Python code read while it ran: the records that an observer makes, and that guards compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from lowtide.capture.python_state.external_effects import hooks_of


class Read(NamedTuple):
    """A value that was read. ``kind``: where ``owner`` has it under ``name`` (``program.objects.current``)."""

    kind: str
    owner: Any
    name: str
    value: Any
    text: str


class Content(NamedTuple):
    """A holder, and what was in it when it was first reached."""

    holder: Any
    items: tuple[Any, ...]


@dataclass(eq=False)
class Reads:
    """All that one or several runs read: single values by kind, owner and name, and holders by their ids."""

    values: dict[tuple[str, int, str], Read] = field(default_factory=dict)
    contents: dict[int, Content] = field(default_factory=dict)
    hidden: dict[int, tuple[nn.Module, list[Any]]] = field(default_factory=dict)  # modules that are registered nowhere
    files: dict[str, Any] = field(default_factory=dict)

    def add(self, later: Reads) -> None:
        """Those of a later run, where nothing is known from earlier ones."""
        for mine, others in zip(vars(self).values(), vars(later).values(), strict=True):
            mine.update({key: value for key, value in others.items() if key not in mine})

    def forget(self, some: Iterable[Read]) -> None:
        for read in some:
            self.values.pop((read.kind, id(read.owner), read.name), None)

    def note(self, kind: str, owner: Any, name: str, value: Any, text: str) -> None:
        self.values.setdefault((kind, id(owner), name), Read(kind, owner, name, value, text))


def put_together(module: nn.Module) -> list[Any]:
    """What a module is made of: classes, parameters, buffers, hooks and submodules, all the way down."""
    return [
        part
        for one in module.modules()
        for part in (
            type(one), *one._parameters.values(), *one._buffers.values(), *one._modules.values(), *hooks_of(one),
        )
    ]  # fmt: skip
