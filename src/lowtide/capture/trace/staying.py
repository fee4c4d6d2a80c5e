"""Make ``module.to(...)`` do nothing if the module is already there (``expert.to(x.device)`` in a forward pass)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def staying(to: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``nn.Module.to`` without its reads of gradients and writes of data if nothing is to change."""

    def moved(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        asked: Any = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, memory_format = asked
        tensors = itertools.chain(module.parameters(), module.buffers())
        stays = memory_format is None and all(
            (device is None or tensor.device == device)
            and (dtype is None or tensor.dtype == dtype or not (tensor.is_floating_point() or tensor.is_complex()))
            for tensor in tensors
        )
        return module if stays else to(module, *args, **kwargs)

    return moved
