"""What a replay works on: operators, the tensors they return, and the storages behind them, which are what is evicted."""

from __future__ import annotations

from lowtide.eviction import Entry
from lowtide.trace.model import Call


class Storage(Entry):
    """``held``: how many of its ``tensors`` the program still has; ``lasting``: it cannot be computed again;
    ``outside``: neither made nor freed by the program."""

    __slots__ = ("held", "lasting", "outside", "tensors")

    def __init__(self, size: int, *, outside: bool = False) -> None:
        super().__init__(size)
        self.outside = outside
        self.tensors: list[Tensor] = []
        self.held = 0
        self.lasting = False

    def keep(self) -> None:
        """Never evict it."""
        self.lasting = self.pinned = True


class Operator:
    """``needed_bytes``: for what it creates and its workspace."""

    __slots__ = ("creates", "name", "needed_bytes", "reads", "time_ns")

    def __init__(self, name: str, time_ns: int, reads: list[Tensor], workspace_bytes: int = 0) -> None:
        self.name = name
        self.time_ns = time_ns
        self.reads = reads
        self.creates: list[Tensor] = []
        self.needed_bytes = workspace_bytes

    @staticmethod
    def of(call: Call, reads: list[Tensor]) -> Operator:
        return Operator(call.name, call.time_ns, reads, call.workspace_bytes)

    def create(self, storage: Storage, number: int) -> Tensor:
        """A tensor in the storage, whose bytes are needed where the tensor is its first."""
        tensor = Tensor(self, storage, number)
        if not storage.tensors:
            self.needed_bytes += storage.bytes
        self.creates.append(tensor)
        storage.tensors.append(tensor)
        storage.held += 1
        return tensor


class Tensor:
    """``defined``: it can be read. An alias is not, although its storage may be there, until its operator has run again.

    ``number``: what the trace calls it.
    """

    __slots__ = ("defined", "held", "number", "operator", "storage")

    def __init__(self, operator: Operator, storage: Storage, number: int) -> None:
        self.operator = operator
        self.storage = storage
        self.number = number
        self.defined = False
        self.held = True
