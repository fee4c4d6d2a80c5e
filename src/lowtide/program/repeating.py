"""Which operators repeat their bits when they run again on the same numbers, and on which devices.

PyTorch's tag for operators that do not, ``nondeterministic_bitwise``, is set on none of them (2.13). So the list is
that of ``torch.use_deterministic_algorithms``, plus the gradients of attention, which were seen to differ on an H200.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from lowtide.device import interface_of

_DIFFERING = re.compile(
    r"index_(add|copy|put|reduce)_?|put_?|scatter_(add|reduce)_?|cumsum_?|histc|bincount|(nan)?median|max_unpool[23]d"
    r"|nll_loss2d_forward|_?adaptive_(avg|max)_pool[23]d_backward|avg_pool3d_backward|fractional_max_pool[23]d_backward"
    r"|max_pool3d_with_indices_backward|_?upsample_\w*linear\w*_backward|_?upsample_bicubic\w*_backward|_ctc_loss_backward"
    r"|(reflection|replication)_pad[123]d_backward|grid_sampler_[23]d_backward|_embedding_bag_(dense_)?backward"
    r"|(_scaled_dot_product)?_(flash|efficient|cudnn)_attention_backward|convolution_backward|_roi_(align|pool)_backward|deform_conv2d_backward"
)


def repeats_bits(operator: Any, device: torch.device) -> bool:
    """Whether an operator gives the same bits each time it runs on the device, with the present settings."""
    return not differs_in_bits(operator) or repeats_all_bits(device)


def repeats_all_bits(device: torch.device) -> bool:
    """Whether all operators do so on the device, with the present settings."""
    return interface_of(device).repeats_bits or torch.are_deterministic_algorithms_enabled()


@functools.cache
def differs_in_bits(operator: Any) -> bool:
    """Whether there are devices on which the operator does not repeat its bits by default."""
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    name = operator._schema.name.split("::")[1]
    scattered = name in ("scatter", "scatter_") and "src" in operator._overloadname
    return scattered or bool(_DIFFERING.fullmatch(name)) or torch.Tag.nondeterministic_bitwise in operator.tags
