"""The memory of a whole training step on a device that need not be there."""

from lowtide.whole_step.answer import Fit
from lowtide.whole_step.fit import fits

__all__ = ["Fit", "fits"]
