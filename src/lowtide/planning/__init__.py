"""Plans: a graph, its costs, and a schedule that fits a budget. How they are made, saved, and kept between processes.
No torch."""

from lowtide.planning.make import infeasible, make_plan, plan_from
from lowtide.planning.plan import Plan

__all__ = ["Plan", "infeasible", "make_plan", "plan_from"]
