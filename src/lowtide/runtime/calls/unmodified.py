"""Whether what a call reads again is as its forward pass left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lowtide.errors import ExecutionError
from lowtide.lower import Lowered
from lowtide.program.distributed.local import address_of, addresses_of, version_of, versions_of

_unseen = Counter[int | None]()  # by address, passes that write there without a new version


def note_unseen(lowered: Lowered, inputs: Sequence[torch.Tensor]) -> None:
    """A forward pass begins, on these flat inputs."""
    _unseen.update(address_of(inputs[i]) for i in lowered.unseen)


class AsLeft:
    """What a forward pass left: versions and addresses of its ``inputs``, of constants, and of the ``outputs`` that are read
    again."""

    def __init__(self, lowered: Lowered, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]):
        self._unseen = {i: _unseen[address_of(inputs[i])] for i in lowered.unseen}
        self._constants = lowered.program.constants
        self._versions, self._addresses = versions_of(inputs), addresses_of(inputs)
        self._constant_states = {value: _state_of(self._constants[value]) for value, _ in lowered.reads_constants}
        self._outputs = [(outputs[i].detach(), outputs[i]._version) for i in lowered.reads_outputs]

    def changed(self, inputs: Sequence[torch.Tensor], read: Sequence[int], again: Sequence[int]) -> list[int]:
        """Those of the flat ``inputs`` that are ``read`` and were written into since, and of those that are to be read
        ``again`` and were given other memory: eager has views of the one that they had."""
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
    """That these inputs, or an output where none is named, are no longer what they were; of inputs that are ``copied`` from now
    on the next calls read what they were."""
    return ExecutionError(
        f"{inputs or 'an output of the model'} was modified in place, or given other data, between the forward and the "
        "backward pass, which needs the value it had. Do that after the backward pass, or modify a clone."
        + (" Later calls read a copy of it, beside the budget where that leaves no room." if copied else "")
    )


def _state_of(constant: torch.Tensor) -> tuple[int | None, int | None]:
    """Another one where it was written into, or given other memory."""
    return version_of(constant), address_of(constant)
