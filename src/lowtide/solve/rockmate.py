"""``rockmate``: a menu of options per block, the dynamic program of ``rotor`` over them.

The forward pass is cut at articulation points modulo cheap long-lived storages; every distinct block gets a menu of
(saved bytes, peaks, time) options, from everything saved to nothing (``lowtide.solve.blocks.menu``), and
``lowtide.solve.blocks.table`` chooses. A heuristic: feasible or unsolved.

Source: Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont 2023 (ICML), arXiv 2307.01236. Deviations: options come from a
greedy line of ever smaller saved sets, not from a mixed-integer program under a grid of budgets; the chain is cut
several times, from about sixty blocks to about six, as too coarse a menu makes feasible budgets look infeasible;
several nominal budgets are tried. O(L^3 M + L^2 K M) for L blocks, K options, M slots, and per distinct block of n
nodes O(n^3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lowtide.solve.blocks.answer import Builder, solve_with_tables
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import distinct, refined_cuts, several_cuts
from lowtide.solve.blocks.table import build_table
from lowtide.solve.options import Options, between
from lowtide.solve.problem import Problem, Solution

_BLOCKS = 60


@dataclass(frozen=True, slots=True)
class Rockmate(Options):
    """``options``: per block, about. ``slots``: as for ``rotor``. ``block_nodes``: above so many forward nodes a block
    is cut again before its menu is made; half as many are tried too."""

    options: int = between(16, 2, 200)
    slots: int = between(500, 0, 5000)
    block_nodes: int = between(120, 4, 200)

    def solve(self, problem: Problem) -> Solution:
        return solve_with_tables("rockmate", problem, self.builders)

    def builders(self, chains: BlockChains) -> list[Builder]:
        """One per way to cut."""
        sizes = (self.block_nodes, max(self.block_nodes // 2, 1))
        cuts = several_cuts(chains.model, _BLOCKS)
        ways = distinct([refined_cuts(chains.model, way, most_nodes) for way in cuts for most_nodes in sizes])
        return [partial(build_table, *chains.with_menus(way, self.options), slots=self.slots) for way in ways]
