"""The memory of a whole training step on a device, which need not be present."""

from lowtide.whole_step.answer import Fit
from lowtide.whole_step.fit import fits

__all__ = ["Fit", "fits"]
