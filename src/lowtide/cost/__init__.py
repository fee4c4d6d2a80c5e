"""What a program costs on a device: measured operator by operator, or modelled from rates where there is no device."""

from lowtide.cost.analytical import analytical_costs
from lowtide.cost.cache import CostCache
from lowtide.cost.measured import measure_costs

__all__ = ["CostCache", "analytical_costs", "measure_costs"]
