"""What benchmarks say of a run: how far its gradients are from others, and why it failed."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

_PLACE = re.compile(r"/\S*/site-packages/")
_LEAST_SCALE = 1e-3
CLOSE = 1e-3  # a gradient_error that compiled code may have whatever rounding does


def gradient_error(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest gradient of the same parameter, or to a thousandth of the largest of
    all where that is more (a key's bias has none but rounding); infinite where other parameters have gradients."""
    if found.keys() != expected.keys():
        return float("inf")
    scales = {name: _largest(gradient) for name, gradient in expected.items()}
    least = max(_LEAST_SCALE * max(scales.values(), default=0.0), 1e-30)
    differences = ((name, _largest(found[name] - gradient)) for name, gradient in expected.items())
    return max((difference / max(scales[name], least) for name, difference in differences), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    """In magnitude; 0 where there are no elements."""
    return tensor.abs().max().item() if tensor.numel() else 0.0


def error_text(error: Exception, length: int) -> str:
    """The first line of the error, and the next where it only announces that; without the folder of installed packages."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".split("\n")]
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return _PLACE.sub("", text)[:length]
