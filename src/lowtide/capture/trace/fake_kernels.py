"""Results of operators whose fake kernel refuses what the real one accepts, or returns something different.

- ``_grouped_mm``: the fake kernel takes bfloat16 only; on the CPU, float32 works too (Mixtral).
- ``_ctc_loss``: the fake kernel refuses, since a shape depends on target lengths; these are known if they are an input.
- Norms: with a low-precision input, statistics have the type of the weight, which is float32 under autocast.
- ``expand`` with symbolic sizes: the strides of dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_ATEN = torch.ops.aten
NORMS = {  # position of the weight
    _ATEN.native_layer_norm.default: 2,
    _ATEN.native_group_norm.default: 1,
    _ATEN._native_batch_norm_legit_functional.default: 1,
}

RESIZED_BACKWARD = {
    getattr(_ATEN, f"{name}_backward").default
    for name in (
        "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d",
        "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa",
    )
}  # fmt: skip


def norm_statistics(function: Any, args: Sequence[Any], result: Any) -> Any:
    """``result`` of a norm on the CPU, with mean and reciprocal deviation in the type of its weight."""
    position = NORMS[function]
    weight = args[position] if len(args) > position else None
    if weight is None or weight.device.type != "cpu" or result[1].dtype == weight.dtype:
        return result
    normed, mean, deviation, *running = result
    return (normed, mean.to(weight.dtype), deviation.to(weight.dtype), *running)


def grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor | None = None, *rest: Any, **named: Any
) -> torch.Tensor:
    """Output of ``aten._grouped_mm``: rows padded to 16 bytes, as the real kernel allocates them."""
    dtype = named.get("out_dtype") or a.dtype
    if a.dim() == 2 and b.dim() == 2:
        assert offsets is not None
        shape = [offsets.shape[0], a.shape[0], b.shape[1]]
    elif a.dim() == 2 or b.dim() == 2:
        shape = [a.shape[-2], b.shape[-1]]
    else:
        shape = [a.shape[0], a.shape[1], b.shape[2]]
    step = 16 // dtype.itemsize
    row = -(-shape[-1] // step) * step
    stride = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, stride, dtype=dtype, device=a.device)


def ctc_loss(log_probabilities: torch.Tensor, longest_target: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of ``aten._ctc_loss``: one loss per sample, and the table of its dynamic program, of shape (batch, time,
    2 x longest target + 1)."""
    batched, steps = log_probabilities.dim() == 3, log_probabilities.shape[0]
    batch = log_probabilities.shape[1] if batched else 1
    loss = log_probabilities.new_empty((batch,) if batched else ())
    return loss, log_probabilities.new_empty((batch, steps, 2 * longest_target + 1))


def ctc_loss_backward(log_probabilities: torch.Tensor) -> torch.Tensor:
    """Contiguous for any layout of the input."""
    return log_probabilities.new_empty(log_probabilities.shape)


def expanded(tensor: torch.Tensor, size: Sequence[Any]) -> torch.Tensor:
    """``tensor.expand(size)`` with symbolic sizes, with the real strides of new dimensions of size 1."""
    shape, strides = list[Any](), list[Any]()  # last dimension first
    for number, wanted in enumerate(reversed(size), 1):
        if number <= tensor.dim():
            known, stride = tensor.shape[-number], tensor.stride(-number)
        else:
            known, stride = 1, shape[-1] * strides[-1] if tensor.dim() else 0
        shape.append(known if isinstance(wanted, int) and wanted == -1 else wanted)
        strides.append(stride if shape[-1] == known else 0)
        if shape[-1] != known and known != 1:
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} cannot be expanded to {tuple(size)}")
    return tensor.as_strided(shape[::-1], strides[::-1])


def resized_backward(
    gradient: torch.Tensor, output_size: Sequence[int], input_size: Sequence[int], *_: Any
) -> torch.Tensor:
    """The gradient of a resized image."""
    layout = torch._prims_common.suggest_memory_format(gradient)
    return torch.empty(input_size, dtype=gradient.dtype, device=gradient.device, memory_format=layout)
