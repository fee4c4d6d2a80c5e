"""From a schedule to something that runs."""

from lowtide.lower.eager import Lowered, lower

__all__ = ["Lowered", "lower"]
