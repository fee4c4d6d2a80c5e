"""How large the storages of a program are, as its device's allocator hands them out."""

from __future__ import annotations

import torch

from lowtide.program.program import Program

_CUDA_GRANULARITY_BYTES = 512


def round_up(nbytes: int, device: torch.device) -> int:
    """CUDA's caching allocator hands out multiples of 512 bytes; the CPU's what was asked for."""
    if device.type != "cuda":
        return nbytes
    return -(-nbytes // _CUDA_GRANULARITY_BYTES) * _CUDA_GRANULARITY_BYTES


def storage_bytes(program: Program) -> list[int]:
    """By the captured layouts: the largest that any value of the storage claims, 0 where it is external."""
    return [
        0
        if storage.external
        else max(round_up(program.metas[value].storage_bytes, program.metas[value].device) for value in storage.values)
        for storage in program.graph.storages
    ]


def program_device(program: Program) -> torch.device:
    """The device of the program: the first that is no CPU, else the CPU (numbers on the host do not count)."""
    devices = [meta.device for meta in program.metas]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
