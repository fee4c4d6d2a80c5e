"""What a replay works on: operators, the tensors they return, and the storages behind them, which are what is evicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.eviction import Entry


@dataclass(eq=False, repr=False, slots=True)
class TracedStorage(Entry):
    """``held``: how many of its ``tensors`` the program still has; ``lasting``: it cannot be computed again;
    ``outside``: neither made nor freed by the program."""

    parents: tuple[TracedStorage, ...] = ()
    children: dict[TracedStorage, None] = field(default_factory=dict)  # type: ignore[assignment]
    outside: bool = False
    tensors: list[TracedTensor] = field(default_factory=list)
    held: int = 0
    lasting: bool = False

    def keep(self) -> None:
        """Never evict it."""
        self.lasting = self.pinned = True

    def dependents(self) -> tuple[list[TracedStorage], list[TracedStorage]]:
        """What was computed from the storage, directly or by way of what nobody holds: the held ones, and those between."""
        held: dict[TracedStorage, None] = {}
        unheld: dict[TracedStorage, None] = {}
        waiting = [self]
        while waiting:
            for child in waiting.pop().children:
                if not (child.resident or child.evicted) or child in held or child in unheld:
                    continue
                (held if child.held else unheld)[child] = None
                if not child.held:
                    waiting.append(child)
        return list(held), list(unheld)


@dataclass(eq=False, repr=False, slots=True)
class TracedOperator:
    """``needed_bytes``: for its workspace, and for what it creates as that is added."""

    name: str
    time_ns: int
    reads: list[TracedTensor]
    needed_bytes: int = 0
    creates: list[TracedTensor] = field(default_factory=list)

    def create(self, storage: TracedStorage, number: int) -> TracedTensor:
        """A tensor in the storage, whose bytes are needed where the tensor is its first."""
        tensor = TracedTensor(self, storage, number)
        if not storage.tensors:
            self.needed_bytes += storage.bytes
        self.creates.append(tensor)
        storage.tensors.append(tensor)
        storage.held += 1
        return tensor


@dataclass(eq=False, repr=False, slots=True)
class TracedTensor:
    """``defined``: it can be read. An alias is not, although its storage may be there, until its operator has run
    again. ``number``: what the trace calls it."""

    operator: TracedOperator
    storage: TracedStorage
    number: int
    defined: bool = False
    held: bool = True
