"""How large the storages of a program are, as its device's allocator hands them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lowtide.ir import Costs
from lowtide.memory.allocators import round_up
from lowtide.program.program import Program


def storage_bytes(program: Program) -> list[int]:
    """By the captured layouts: the largest that any value of the storage claims, 0 where it is external."""
    return [
        0
        if storage.external
        else max(round_up(program.metas[value].storage_bytes, program.metas[value].device) for value in storage.values)
        for storage in program.graph.storages
    ]


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind tensors, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def byte_costs(program: Program) -> Costs:
    """Costs in which nothing but storages counts."""
    none = [0] * len(program.graph.ops)
    return Costs(none, none, storage_bytes(program))  # type: ignore[arg-type]


def device_of_inputs(inputs: Sequence[torch.Tensor]) -> torch.device:
    """The device of the program with these inputs: that of the first which is no number on the host."""
    return next((x.device for x in inputs if x.dim() > 0 or x.device.type != "cpu"), torch.device("cpu"))


def program_device(program: Program) -> torch.device:
    """The device of the program: the first that is no CPU, else the CPU (numbers on the host do not count)."""
    devices = [meta.device for meta in program.metas]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
