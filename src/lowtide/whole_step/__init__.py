"""The memory of a whole training step on a device that need not be there."""

from lowtide.whole_step.fit import Fit, fits

__all__ = ["Fit", "fits"]
