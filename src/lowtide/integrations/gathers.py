"""What FSDP2 itself holds, event by event, in a forward and backward pass of a model whose blocks are units of their own.

A unit's shards are gathered into one flat buffer, which is unpacked into the parameters. In the forward pass the buffer stays
until the next unit's is there, and a block's parameters go when the block ends; the root's stay to the end. In the
backward pass the buffer goes at once, and the block's that comes next is gathered ahead. When a block's backward pass ends,
its parameters go, then the input of the previous block's reduction, and its gradients become the input of its own; what
stays is its part of their sum. The root is reduced last.

On the CPU gloo gathers and reduces by way of a copy of its own, and the thread that did it may hold on to the copy after the
call has returned: it is counted until the next collective is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from lowtide.memory.allocators import round_up


@dataclass(frozen=True, slots=True)
class Unit:
    """Bytes of a unit: the gathered buffer, the parameters unpacked from it, their gradients, and the input and the output of
    the gradients' reduction; ``copied`` where collectives make copies."""

    buffer_bytes: int
    parameter_bytes: int
    gradient_bytes: int
    reduced_bytes: int
    shard_bytes: int
    copied: bool

    @staticmethod
    def of(parameters: Iterable[nn.Parameter], ranks: int) -> Unit:
        """Every parameter is padded to ``ranks`` equal parts of its first dimension."""
        held = list(parameters)
        if not held:
            return Unit(0, 0, 0, 0, 0, False)
        device = held[0].device
        padded = [_padded_bytes(parameter, ranks) for parameter in held]
        reduced = sum(size for size, p in zip(padded, held, strict=True) if p.requires_grad)
        return Unit(
            buffer_bytes=round_up(sum(padded), device) if ranks > 1 else 0,
            parameter_bytes=sum(round_up(size, device) for size in padded),
            gradient_bytes=sum(round_up(p.numel() * p.element_size(), device) for p in held if p.requires_grad),
            reduced_bytes=round_up(reduced, device),
            shard_bytes=round_up(reduced // ranks, device),
            copied=ranks > 1 and device.type == "cpu",
        )


def _padded_bytes(parameter: nn.Parameter, ranks: int) -> int:
    rows = parameter.shape[0] if parameter.dim() else 1
    row_bytes = parameter.numel() * parameter.element_size() // max(rows, 1)
    return -(-rows // ranks) * ranks * row_bytes


@dataclass(slots=True)
class Gathers:
    """The bytes that are held as a pass goes by; each event returns the most that are while it happens."""

    units: Sequence[Unit]
    root: Unit
    held_bytes: int = 0
    _deferred: int = 0  # the forward pass's last buffer
    _reduction: int = 0  # the last reduction's input
    _copy: int = 0  # of the last collective
    _ahead: set[int] = field(default_factory=set)  # blocks gathered for the backward pass
    _order: list[int] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, blocks: Sequence[nn.Module], ranks: int) -> Gathers:
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
        return Gathers([Unit.of(block.parameters(), ranks) for block in blocks], Unit.of(outside, ranks))

    def begin(self) -> int:
        return self._gather_forward(self.root)

    def enter(self, block: int, backward: bool) -> int:
        unit = self.units[block]
        if not backward:
            self._order.append(block)
            return self._gather_forward(unit)
        first = () if block in self._ahead else self._collective(unit, unit.buffer_bytes)
        self._ahead.discard(block)
        return self._change(*first, unit.parameter_bytes, -unit.buffer_bytes, *self._gather_ahead(block))

    def leave(self, block: int, backward: bool) -> int:
        unit = self.units[block]
        return self._reduce(unit) if backward else self._change(-unit.parameter_bytes)

    def turn(self) -> int:
        """Between the passes: the root's forward pass ends, its backward pass begins."""
        deferred, self._deferred = self._deferred, 0
        return self._change(-deferred, *self._gather_ahead(None))

    def end(self) -> int:
        return self._reduce(self.root)

    def _gather_forward(self, unit: Unit) -> int:
        deferred, self._deferred = self._deferred, unit.buffer_bytes
        return self._change(*self._collective(unit, unit.buffer_bytes), -deferred, unit.parameter_bytes)

    def _gather_ahead(self, after: int | None) -> tuple[int, ...]:
        """For the block that ran before ``after`` in the forward pass, the last one for ``None``."""
        index = len(self._order) if after is None else self._order.index(after) if after in self._order else 0
        if index == 0 or self._order[index - 1] in self._ahead:
            return ()
        block = self._order[index - 1]
        self._ahead.add(block)
        return self._collective(self.units[block], self.units[block].buffer_bytes)

    def _reduce(self, unit: Unit) -> int:
        """The unit's gradients are taken as allocated here: while the block ran they were its own."""
        previous, self._reduction = self._reduction, unit.reduced_bytes
        return self._change(
            -unit.parameter_bytes,
            unit.gradient_bytes,
            -previous,
            unit.reduced_bytes,
            -unit.gradient_bytes,
            *(self._collective(unit, unit.shard_bytes, unit.reduced_bytes) if unit.reduced_bytes else ()),
        )

    def _collective(self, unit: Unit, output_bytes: int, copied_bytes: int | None = None) -> tuple[int, ...]:
        """Changes by a collective that copies what it moves, by default as much as its output."""
        previous, self._copy = self._copy, (output_bytes if copied_bytes is None else copied_bytes) * unit.copied
        return output_bytes, self._copy, -previous

    def _change(self, *changes: int) -> int:
        most = self.held_bytes
        for change in changes:
            self.held_bytes += change
            most = max(most, self.held_bytes)
        return most
