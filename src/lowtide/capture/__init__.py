"""From ``nn.Module`` and a sample to a ``Program``: the whole forward and backward pass at ATen level."""

from lowtide.capture.capture import capture

__all__ = ["capture"]
