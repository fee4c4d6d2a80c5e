"""Lowers a schedule to generated code that runs it."""

from lowtide.lower.addresses import Addresses
from lowtide.lower.eager import Lowered, Step, lower
from lowtide.lower.gradient_groups import GradientGroup

__all__ = ["Addresses", "GradientGroup", "Lowered", "Step", "lower"]
