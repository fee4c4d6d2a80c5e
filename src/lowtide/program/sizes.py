"""How large the storages of a program are, as its device's allocator hands them out, and what lies there beside a pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from lowtide.errors import PlanError
from lowtide.ir import Costs
from lowtide.memory.allocators import device_memory, round_up
from lowtide.program.distributed.gathers import sharded_collectives
from lowtide.program.distributed.local import local_of
from lowtide.program.layouts import dense_parts, memory_of
from lowtide.program.program import Program
from lowtide.units import format_bytes


def storage_bytes(program: Program) -> list[int]:
    """By the captured layouts: the largest that any value of the storage claims, 0 where it is external."""
    return [
        0
        if storage.external
        else max(round_up(program.metas[value].storage_bytes, program.metas[value].device) for value in storage.values)
        for storage in program.graph.storages
    ]


def kept_bytes(program: Program) -> int:
    """Of the copies that it keeps of inputs that it writes into."""
    outputs = program.graph.forward_outputs
    return sum(program.metas[value].storage_bytes for value in outputs[len(outputs) - len(program.kept) :])


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the storages behind tensors, each once; of distributed ones what this rank holds."""
    held = [part for tensor in tensors for part in dense_parts(local_of(tensor))]
    return sum({memory_of(part): part.untyped_storage().nbytes() for part in held}.values())


def strided_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the elements of those tensors that have strides, and of what sparse ones are made of."""
    parts = (part for tensor in tensors for part in dense_parts(tensor))
    return sum(one.nbytes for one in parts if one.layout is torch.strided and not one.is_nested)


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


class Outside(NamedTuple):
    """Bytes that a total budget counts beside those of a pass: what is ``reserved`` for the caller; ``held`` by parameters,
    buffers and inputs; gradients that are there; the states that the optimizer keeps."""

    reserved: int = 0
    held: int = 0
    gradients: int = 0
    states: int = 0

    @property
    def bytes(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        names = "reserved", "parameters, buffers and inputs", "gradients", "optimizer states"
        return ", ".join(f"{name} {format_bytes(size)}" for name, size in zip(names, self, strict=True) if size)


def outside_of(program: Program, model: nn.Module | None, states: int | None) -> Outside:
    """What is there beside a pass of ``program``. ``states``: bytes of the optimizer's; where they are not known, two for each
    parameter that trains, as Adam has."""
    metas = {value: program.metas[value] for value in program.graph.inputs}
    inputs = {program.graph.values[value].storage: meta.storage_bytes for value, meta in metas.items()}
    trained = [program.inputs[position] for position in {*program.updated, *dict(program.gradients)}]
    trainable = sum(program.metas[value].storage_bytes for value in trained if value is not None)
    units = {target.unit for _, target in sharded_collectives(program)}
    shards = [parameter for unit in units for parameter in unit.parameters]
    trainable += held_bytes(parameter for parameter in shards if parameter.requires_grad)
    gradients = gradient_bytes(model) if model else 0
    return Outside(0, sum(inputs.values()) + held_bytes(shards), gradients, 2 * trainable if states is None else states)


def outside_of_model(model: nn.Module, states: int | None) -> Outside:
    """The same of a model without a program, so without the inputs of its calls."""
    held = held_bytes([*model.parameters(), *model.buffers()])
    trainable = held_bytes(parameter for parameter in model.parameters() if parameter.requires_grad)
    return Outside(0, held, gradient_bytes(model), 2 * trainable if states is None else states)


def gradient_bytes(model: nn.Module) -> int:
    """Of the gradients that the model's parameters have now."""
    return sum(local_of(p.grad).untyped_storage().nbytes() for p in model.parameters() if p.grad is not None)


def check_device(program: Program, budget: int) -> None:
    """Raises ``PlanError`` for a budget above the memory of the program's device."""
    device = program_device(program)
    if (memory := device_memory(device)) is not None and budget > memory:
        raise PlanError(f"a budget of {budget} bytes is more than the device {device} has ({memory} bytes); lower it.")
