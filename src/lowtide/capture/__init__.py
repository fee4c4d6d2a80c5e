"""From ``nn.Module`` and a sample to a ``Program``: the whole forward and backward pass at ATen level, and its contract."""

from lowtide.capture.capture import capture
from lowtide.capture.contract import Captured
from lowtide.capture.known import Known

__all__ = ["Captured", "Known", "capture"]
