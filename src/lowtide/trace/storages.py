"""The objects of a replay: operators, the tensors they return, and the storages of these, which can be evicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.eviction import Entry


@dataclass(eq=False, repr=False, slots=True)
class TracedStorage(Entry):
    """``held``: how many of its ``tensors`` the program still holds. ``lasting``: it cannot be computed again.
    ``outside``: the program neither makes nor frees it."""

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
        """The storages computed from this one, directly or through storages that nobody holds: those held, and those in
        between."""
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
    """``needed_bytes``: for its workspace and its new storages."""

    name: str
    time_ns: int
    reads: list[TracedTensor]
    needed_bytes: int = 0
    creates: list[TracedTensor] = field(default_factory=list)

    def create(self, storage: TracedStorage, number: int) -> TracedTensor:
        """A new tensor in the storage. If it is the storage's first, its bytes are needed."""
        tensor = TracedTensor(self, storage, number)
        if not storage.tensors:
            self.needed_bytes += storage.bytes
        self.creates.append(tensor)
        storage.tensors.append(tensor)
        storage.held += 1
        return tensor


@dataclass(eq=False, repr=False, slots=True)
class TracedTensor:
    """``defined``: it can be read. After an eviction, an alias is undefined until its operator has run again, even if
    its storage is present. ``number``: its number in the trace."""

    operator: TracedOperator
    storage: TracedStorage
    number: int
    defined: bool = False
    held: bool = True
