"""What Python code can ask its process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.capture.python_state.code import process


def test_flags_of_precision_that_exclude_each_other() -> None:
    flags: Any = torch.backends.cudnn.conv
    before, found = flags.fp32_precision, []
    try:
        for precision in ("ieee", "tf32"):
            flags.fp32_precision = precision
            found.append(process.backends())
            if precision != before:
                with pytest.raises(RuntimeError):
                    _ = torch.backends.cudnn.allow_tf32
    finally:
        flags.fp32_precision = before
    assert len({*found}) == 2
