"""What a program did, operator by operator: ``lowtide-trace/1`` in memory.

Grammar::

    trace    ::= event*                          in the order of execution
    event    ::= Constant | OperatorCall | Release | Pin
    Constant ::= tensor bytes                        made outside of the program, there throughout
    OperatorCall ::= name time reads creates writes  one operator; what it creates has bytes or is an alias of what it reads
    Release  ::= tensor                              the program has no more use for it
    Pin      ::= tensor                              it must be there from here on

Tensors are numbered by the writer, each number used once. Tensors that are aliases of each other share one storage, which
has the bytes of the first. A call that *writes* a tensor leaves a new version of its storage, at which all its aliases
look from then on. A ``random`` call can be replayed from its generator's state; one that runs ``once`` can not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constant:
    tensor: int
    bytes: int

    def __str__(self) -> str:
        return f"constant %{self.tensor} bytes={self.bytes}"


@dataclass(frozen=True, slots=True)
class Created:
    """``alias_of``: the tensor whose storage it shares, if any. The call reads that tensor, and the bytes are 0
    then."""

    tensor: int
    bytes: int
    alias_of: int | None = None

    def __str__(self) -> str:
        return f"%{self.tensor} of %{self.alias_of}" if self.alias_of is not None else f"%{self.tensor} {self.bytes}"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    name: str
    time_ns: int
    reads: tuple[int, ...]
    creates: tuple[Created, ...]
    writes: tuple[int, ...] = ()
    workspace_bytes: int = 0
    random: bool = False
    once: bool = False

    def __str__(self) -> str:
        reads = ", ".join(f"%{tensor}" for tensor in self.reads)
        line = f"{', '.join(map(str, self.creates)) or '()'} = {self.name}({reads}) time_ns={self.time_ns}"
        if self.writes:
            line += f" writes=({', '.join(f'%{tensor}' for tensor in self.writes)})"
        if self.workspace_bytes:
            line += f" workspace_bytes={self.workspace_bytes}"
        return line + " random" * self.random + " once" * self.once


@dataclass(frozen=True, slots=True)
class Release:
    tensor: int

    def __str__(self) -> str:
        return f"release %{self.tensor}"


@dataclass(frozen=True, slots=True)
class Pin:
    tensor: int

    def __str__(self) -> str:
        return f"pin %{self.tensor}"


Event = Constant | OperatorCall | Release | Pin


@dataclass(frozen=True, slots=True)
class Trace:
    """``budget_bytes``: the budget of the run, if it had one. ``device``: where times were measured. ``forward_calls``:
    the number of calls in the forward pass, if known."""

    events: tuple[Event, ...]
    name: str = ""
    device: str = ""
    budget_bytes: int | None = None
    forward_calls: int | None = None

    @property
    def time_ns(self) -> int:
        """The time of all calls, each run once."""
        return sum(event.time_ns for event in self.calls())

    def calls(self) -> Iterator[OperatorCall]:
        return (event for event in self.events if isinstance(event, OperatorCall))

    def __str__(self) -> str:
        head = f'trace "{self.name}" device="{self.device}"'
        if self.budget_bytes is not None:
            head += f" budget_bytes={self.budget_bytes}"
        return "\n".join([head, *map(str, self.events)]) + "\n"
