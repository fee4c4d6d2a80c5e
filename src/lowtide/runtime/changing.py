"""Inputs of planned calls that others write into before the backward pass.

Eager reads in the backward pass what it saved; a plan may also read a buffer, an attribute or an argument again to compute
what eager had saved. Where that is written into meanwhile (a memory of embeddings, a moving average that is updated after the
call), it would find another value. So the first calls of a program read copies of such inputs, and all later ones copies of
those that changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program import Program
from lowtide.program.local import spec_of
from lowtide.runtime.entry import Entry

_FIRST_CALLS = 2
_LARGE_ARGUMENT = 1 << 20  # bytes: an activation, which is copied only where it is known to change


class ChangingInputs:
    """``changed``: names of buffers, or numbers of other inputs, that were seen to change between the two passes."""

    def __init__(self) -> None:
        self.changed: set[str | int] = set()

    def copied(self, entry: Entry, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The flat inputs that a call by this program is to copy."""
        early = entry.calls < _FIRST_CALLS
        if not early and not self.changed:
            return ()
        if entry.read_again is None:
            entry.read_again = _only_read_again(entry.program)
        states = len(entry.program.state_names)

        def is_copied(i: int) -> bool:
            if inputs[i].layout is not torch.strided or spec_of(inputs[i]) is not None:
                return False
            tried = early and (i < states or inputs[i].nbytes <= _LARGE_ARGUMENT)
            return tried or _key(entry.program, i) in self.changed

        return tuple(filter(is_copied, entry.read_again))

    def note(self, entry: Entry, changed: Sequence[int]) -> None:
        """These were written into since the forward pass."""
        self.changed.update(_key(entry.program, i) for i in changed)


def _key(program: Program, i: int) -> str | int:
    names = program.state_names
    return names[i][0] if i < len(names) else i - len(names)


def _only_read_again(program: Program) -> tuple[int, ...]:
    """Inputs beside parameters that operators of the forward pass read, and none of the backward pass: eager does not save
    them. What the program updates itself, it keeps itself."""
    graph = program.graph
    known = {graph.values[value].storage for op in graph.ops[graph.forward_ops :] for value in op.inputs}
    known |= {graph.values[op.inputs[0]].storage for op in graph.ops if op.target == UPDATE_TARGET}
    read = {value for op in graph.ops[: graph.forward_ops] for value in op.inputs}
    storages = [None if value is None else graph.values[value].storage for value in program.inputs]
    reading = {graph.values[value].storage for value in read} - known
    return tuple(i for i, storage in enumerate(storages) if i >= program.parameters and storage in reading)
