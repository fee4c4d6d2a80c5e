"""What a plan depends on: one plan per signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lowtide.capture.trace.autocast import is_kept
from lowtide.program.keys import fingerprint, tensor_key

Signature = tuple[Any, ...]
Names = tuple[tuple[str, ...], ...]


def signature(modules: Sequence[nn.Module], inputs: Sequence[torch.Tensor], names: Names, tree: Any) -> Signature:
    """Structure and non-tensor values of the call (``tree``), names of the model's tensors and layout of every flat input,
    flags of the modules, autocast and modes."""
    device_type = inputs[0].device.type
    autocast = torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type)
    return (
        names,
        fingerprint(tree),
        tuple(map(tensor_key, inputs)),
        tuple(module.training for module in modules),
        any(module.__dict__.get("gradient_checkpointing") for module in modules),
        autocast and (autocast, torch.is_autocast_cache_enabled(), *map(is_kept, inputs)),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        _kernels(),
    )


def _kernels() -> tuple[Any, ...]:
    """Which kernels operators may choose when they are traced."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
    )


def describe(inputs: Sequence[torch.Tensor], states: int) -> str:
    """The call's tensors in a few words, for messages."""
    tensors = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in inputs[states:]]
    return ", ".join(tensors) or "no tensors"
