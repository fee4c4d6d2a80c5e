"""``h-rockmate``: any graph partitioned recursively, options composed upwards, a dynamic program at the top.

Three steps: ``partition`` cuts the forward pass into parts of a few nodes where fewest bytes cross, whatever crosses
(long skips, U-Nets and encoder-decoders included), and bundles them; ``compose`` makes each bundle's menu from its
halves', equal parts once; ``blocks.table`` chooses among the bundles' options. A heuristic: feasible or unsolved.

Source: Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont, H-Rockmate (HAL 04403844) and HiRemate (ICML 2025).
Deviations: parts are intervals of the program order, halves are joined by enumeration instead of a mixed-integer
program per subgraph, and the top level is a dynamic program over intervals. For parts of p nodes and K options about
O(n p^2 + n K^2 log n) steps of a sweep and O(L^3 M) for the top.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.solve.blocks.answer import Builder, solve_with_tables
from lowtide.solve.blocks.compose import composed_chain
from lowtide.solve.blocks.partition import top_cuts
from lowtide.solve.blocks.table import build_table
from lowtide.solve.keep_all import KeepAll
from lowtide.solve.model.compact import Compact, compact
from lowtide.solve.model.tables import Tables, make_tables
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class HRockmate:
    """``options``: per part, about. ``part_nodes``: forward nodes of the smallest parts, at most. ``top``: bundles at
    the top level, about. ``slots``: as for ``rotor``."""

    options: int = 16
    part_nodes: int = 12
    top: int = 24
    slots: int = 500

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("options", self.options, 2, 100),
            ("part-nodes", self.part_nodes, 1, 100),
            ("top", self.top, 1, 100),
            ("slots", self.slots, 0, 5000),
        ):
            if not low <= value <= high:
                raise PlanError(
                    f"h-rockmate: {name} is {value}, but goes from {low} to {high}; "
                    f"write for instance 'h-rockmate{{{name}={max(low, 16)}}}'"
                )

    def solve(self, problem: Problem) -> Solution:
        began = time.perf_counter()
        model = compact(problem.graph, problem.costs)
        if not 0 < model.boundary < model.nodes:
            return KeepAll().solve(problem)
        tables = make_tables(model)
        unique = top_cuts(model, self.top, self.part_nodes)
        builders = [self._builder(model, tables, cuts) for cuts in unique]
        return solve_with_tables("h-rockmate", problem, model, tables, builders, began)

    def _builder(self, model: Compact, tables: Tables, tops: list[int]) -> Builder:
        """Menus composed once, tables of the chain of bundles as they are asked for."""
        chain, menus = composed_chain(model, tables, tops, self.part_nodes, self.options)
        return lambda room: build_table(chain, menus, room, self.slots)
