"""Check that what a call reads again is as its forward pass left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lowtide.errors import ExecutionError
from lowtide.lower import Lowered
from lowtide.program.distributed.local import address_of, addresses_of, version_of, versions_of

_unseen = Counter[int | None]()  # number of passes that write to an address without a new version


def note_unseen(lowered: Lowered, inputs: Sequence[torch.Tensor]) -> None:
    """A forward pass on these flat inputs begins: count those that it writes to without a new version."""
    _unseen.update(address_of(inputs[i]) for i in lowered.unseen)


class AsLeft:
    """The state after a forward pass: versions and addresses of its ``inputs``, of constants, and of ``outputs`` that
    are read again."""

    def __init__(self, lowered: Lowered, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]):
        self._unseen = {i: _unseen[address_of(inputs[i])] for i in lowered.unseen}
        self._constants = lowered.program.constants
        self._versions, self._addresses = versions_of(inputs), addresses_of(inputs)
        self._constant_states = {value: _state_of(self._constants[value]) for value, _ in lowered.reads_constants}
        self._outputs = [(outputs[i].detach(), outputs[i]._version) for i in lowered.reads_outputs]

    def changed(self, inputs: Sequence[torch.Tensor], read: Sequence[int], again: Sequence[int]) -> list[int]:
        """Those flat ``inputs`` that are ``read`` and were written to since, and those to be read ``again`` that got
        other memory (eager has views of the old memory)."""
        found = {i for i in read if self.is_written(inputs, i)}
        found |= {i for i in again if address_of(inputs[i]) != self._addresses[i]}
        found |= {i for i, count in self._unseen.items() if i in read and _unseen[address_of(inputs[i])] != count}
        return sorted(found)

    def is_written(self, inputs: Sequence[torch.Tensor], i: int) -> bool:
        return version_of(inputs[i]) != self._versions[i]

    def constants_changed(self, read: Iterable[int]) -> bool:
        return any(_state_of(self._constants[value]) != self._constant_states[value] for value in read)

    def outputs_changed(self) -> bool:
        return any(tensor._version != version for tensor, version in self._outputs)


def modified(inputs: str, copied: bool) -> ExecutionError:
    """The error that these inputs, or an output if none is named, were changed. ``copied``: later calls will read a
    copy."""
    return ExecutionError(
        f"{inputs or 'an output of the model'} was modified in place, or given other data, between the forward and the "
        "backward pass, which needs the value it had. Do that after the backward pass, or modify a clone."
        + (" Later calls read a copy of it, beside the budget where that leaves no room." if copied else "")
    )


def _state_of(constant: torch.Tensor) -> tuple[int | None, int | None]:
    """A key that changes when the tensor is written to or gets other memory."""
    return version_of(constant), address_of(constant)
