"""What tests need of PyTorch beyond the oldest version that lowtide takes."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

needs_2_13 = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.13",
    reason="needs PyTorch 2.13, see docs/how-it-works.md for what is missing before",
)
