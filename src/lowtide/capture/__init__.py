"""From ``nn.Module`` and a sample to a ``Program``: the whole forward and backward pass at ATen level."""

from lowtide.capture.capture import capture
from lowtide.capture.program import Call, Program, Ref, TensorMeta
from lowtide.capture.results import Result

__all__ = ["Call", "Program", "Ref", "Result", "TensorMeta", "capture"]
