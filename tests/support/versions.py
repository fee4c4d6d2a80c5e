"""What tests need of PyTorch beyond the oldest version that lowtide takes."""

from __future__ import annotations

import pytest
import torch
from torch.torch_version import TorchVersion

_VERSION = TorchVersion(torch.__version__)

needs_2_13 = pytest.mark.skipif(_VERSION < "2.13", reason="is missing before PyTorch 2.13, see docs/how-it-works.md")
needs_known_fsdp2 = pytest.mark.skipif(
    _VERSION < "2.13" or _VERSION >= "2.15", reason="fully_shard is another than that of PyTorch 2.13"
)
