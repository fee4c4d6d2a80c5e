"""Inputs of planned calls that other code writes to before the backward pass.

In the backward pass, eager reads what it saved. A plan may instead read a buffer, an attribute or an argument again, to
recompute what eager saved. If that was written to meanwhile (a memory of embeddings, a moving average updated after the
call), the plan would read a wrong value. So the first calls of a program read copies of such inputs, as far as the
budget has room beside the plan (or the plans of all parts). Later calls read copies only of inputs that changed. Copied
in any case: buffers that their module writes outside of ``forward``, small inputs of parts, and in a part's first call,
which measures operators, its arguments.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.ir.graph import UPDATE_TARGET
from lowtide.program import Program
from lowtide.program.distributed.local import spec_of
from lowtide.runtime.programs.entry import Entry

_FIRST_CALLS = 2
_SMALL_OF_PART = 1 << 20  # bytes; larger inputs are copied only if known to change
_FORWARD = ("forward", "__init__")


class Copying(Protocol):
    """What calls copy inputs for: a model, or with ``shares_budget`` one of several parts."""

    shares_budget: bool

    @property
    def model(self) -> nn.Module: ...

    def room_for_copies(self, entry: Entry) -> int: ...


class ChangingInputs:
    """``changed``: names of buffers, or numbers of arguments, that were seen to change between the two passes."""

    def __init__(self) -> None:
        self.changed: set[str | int] = set()

    def copied(self, entry: Entry, inputs: Sequence[torch.Tensor], owner: Copying) -> tuple[int, ...]:
        """The flat inputs that a call of ``owner`` by this entry has to copy."""
        early = entry.calls < _FIRST_CALLS
        if not early and not self.changed:
            return ()
        first_of_part = owner.shares_budget and not entry.calls
        room = _SMALL_OF_PART if first_of_part or not early else owner.room_for_copies(entry)
        found = []
        copyable = (i for i in _read_again(entry) if _can_be_copied(inputs[i]))
        for i in sorted(copyable, key=lambda one: inputs[one].nbytes):
            key, size = _key(entry.program, i), inputs[i].nbytes
            small = size <= room or (first_of_part and isinstance(key, int))
            wanted = key in self.changed or (early and (small or _may_change(owner.model, key)))
            if wanted:
                room -= 0 if first_of_part else size
                found.append(i)
        return tuple(sorted(found))

    def note(self, entry: Entry, changed: Mapping[int, torch.Tensor]) -> bool:
        """These inputs were written to since the forward pass. Returns whether later calls will read copies of all of
        them."""
        self.changed.update(_key(entry.program, i) for i in changed)
        return all(i in _read_again(entry) and _can_be_copied(tensor) for i, tensor in changed.items())


def _read_again(entry: Entry) -> tuple[int, ...]:
    if entry.read_again is None:
        entry.read_again = _only_read_again(entry.program)
    return entry.read_again


def _can_be_copied(tensor: torch.Tensor) -> bool:
    """Whether a copy can replace the tensor for every operator. Parameters (inputs in ``torch.compile``) are not
    copied."""
    if isinstance(tensor, nn.Parameter):
        return False
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and spec_of(tensor) is None and not lazy


def _may_change(model: nn.Module, key: str | int) -> bool:
    """Whether an input is a buffer that its module names in a method that writes something."""
    if isinstance(key, int):
        return False
    owner, _, name = key.rpartition(".")
    kind: Any = type(model.get_submodule(owner))
    return name in _named_by_writers(kind)


@functools.cache
def _named_by_writers(kind: Any) -> frozenset[str]:
    """The names used by those methods of a module's class that write something, except ``forward`` and ``__init__``."""
    members = (vars(each).get(name) for each in kind.__mro__ if each not in nn.Module.__mro__ for name in vars(each))
    functions = (one for one in members if isinstance(one, types.FunctionType) and one.__name__ not in _FORWARD)
    return frozenset(name for function in functions if _writes(function) for name in function.__code__.co_names)


def _writes(function: types.FunctionType) -> bool:
    """Whether a function sets an attribute, an item or a slice, or calls a function named like an in-place operator."""
    operators = {item.opname for item in dis.get_instructions(function)} & {"STORE_SUBSCR", "STORE_SLICE", "STORE_ATTR"}
    return bool(operators) or any(name.endswith("_") and name[:1] != "_" for name in function.__code__.co_names)


def _key(program: Program, i: int) -> str | int:
    names = program.state_names
    return names[i][0] if i < len(names) else i - len(names)


def _only_read_again(program: Program) -> tuple[int, ...]:
    """Inputs other than parameters that only operators of the forward pass read: eager does not save them. Excludes
    what the program itself updates, as it handles the old values of these."""
    graph = program.graph
    known = {graph.values[value].storage for op in graph.ops[graph.forward_ops :] for value in op.inputs}
    known |= {graph.values[op.inputs[0]].storage for op in graph.ops if op.target == UPDATE_TARGET}
    read = {value for op in graph.ops[: graph.forward_ops] for value in op.inputs}
    storages = [None if value is None else graph.values[value].storage for value in program.inputs]
    reading = {graph.values[value].storage for value in read} - known
    return tuple(i for i, storage in enumerate(storages) if i >= program.parameters and storage in reading)
