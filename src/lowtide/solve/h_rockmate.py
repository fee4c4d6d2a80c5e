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

from dataclasses import dataclass
from functools import partial

from lowtide.solve.blocks.answer import Builder, solve_with_tables
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import top_cuts
from lowtide.solve.blocks.table import build_table
from lowtide.solve.options import Options, between
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class HRockmate(Options):
    """``options``: per part, about. ``part_nodes``: forward nodes of the smallest parts, at most. ``top``: bundles at
    the top level, about. ``slots``: as for ``rotor``."""

    options: int = between(16, 2, 100)
    part_nodes: int = between(12, 1, 100)
    top: int = between(24, 1, 100)
    slots: int = between(500, 0, 5000)

    def solve(self, problem: Problem) -> Solution:
        return solve_with_tables("h-rockmate", problem, self.builders)

    def builders(self, chains: BlockChains) -> list[Builder]:
        """Menus composed once per way to bundle, tables of the chain of bundles as they are asked for."""
        ways = top_cuts(chains.model, self.top, self.part_nodes)
        composed = (chains.composed(tops, self.part_nodes, self.options) for tops in ways)
        return [partial(build_table, *chain_and_menus, slots=self.slots) for chain_and_menus in composed]
