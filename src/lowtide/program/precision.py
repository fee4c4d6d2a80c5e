"""How precisely the process multiplies 32-bit floats, by PyTorch's old flags or by the new ones
(``fp32_precision``)."""

from __future__ import annotations

from typing import Any

import torch


def tf32(flags: Any) -> Any:
    """The old flag of a backend, or the new settings that replace it: PyTorch refuses to read the old flag after the
    new ones were set."""
    try:
        return flags.allow_tf32
    except RuntimeError:
        parts = (flags, getattr(flags, "conv", None), getattr(flags, "rnn", None))
        return tuple(getattr(part, "fp32_precision", None) for part in parts)


def matmul_precision() -> str:
    """``torch.get_float32_matmul_precision()``, or the new settings that replace it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends = (torch.backends.cuda, torch.backends.mkldnn)
        return str(tuple(getattr(one.matmul, "fp32_precision", None) for one in backends))
