"""Costs of a program on a device: measured operator by operator, or modelled from peak rates without a device."""

from lowtide.cost.analytical import analytical_costs
from lowtide.cost.cache import CostCache
from lowtide.cost.measured import measure_costs

__all__ = ["CostCache", "analytical_costs", "measure_costs"]
