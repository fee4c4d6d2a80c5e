"""From ``nn.Module`` and a sample to a ``Program``: the whole forward and backward pass at ATen level, and its contract."""

from lowtide.capture.capture import Known, capture
from lowtide.capture.contract import Captured

__all__ = ["Captured", "Known", "capture"]
