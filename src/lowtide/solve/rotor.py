"""``rotor``: the dynamic program of Beaumont et al. over a chain of blocks, each saved whole or not at all.

The forward pass is cut at articulation points modulo cheap long-lived storages (``lowtide.solve.blocks.partition``); a block
either saves everything or the chain stores a block's input and runs on (recurrence in ``lowtide.solve.blocks.table``).
On a chain with exact bytes the table's time is the least of any memory-persistent schedule (one in which what is stored
stays until its backward use) that treats blocks so. Not exact otherwise; the answer is feasible or unsolved.

Source: Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, arXiv 1911.13214 (its optimal persistent schedules).
Deviations: what crosses a cut may be several storages; gradients that stay (those of weights) are counted when they are
there; ``trim`` (on by default) gives the last forward of a nested segment a variant without its output, which nobody
needs again. Several nominal budgets are tried (``lowtide.solve.blocks.answer``). O(L^3 M) time for L blocks and M slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from lowtide.solve.blocks.answer import Builder, solve_with_tables
from lowtide.solve.blocks.chain import Chain, make_chain
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.menu import everything
from lowtide.solve.blocks.partition import several_cuts
from lowtide.solve.blocks.table import Table, build_table
from lowtide.solve.options import Options, between
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class Rotor(Options):
    """``slots``: memory is counted in so many parts of the budget, rounded up; 0 counts bytes. ``trim``: see above.
    ``blocks``: at most so many, the quickest neighbours merged; half,
    a quarter and so on of them are tried too."""

    slots: int = between(500, 0, 5000)
    trim: bool = True
    blocks: int = between(80, 1, 200)

    def solve(self, problem: Problem) -> Solution:
        return solve_with_tables("rotor", problem, self.builders)

    def builders(self, chains: BlockChains) -> list[Builder]:
        """One per way to cut."""
        return [partial(self.table, make_chain(chains.model, cuts)) for cuts in several_cuts(chains.model, self.blocks)]

    def table(self, chain: Chain, most_bytes: int) -> Table:
        """One table for every budget up to ``most_bytes`` (``fixed_bytes`` apart)."""
        menus = [(everything(chain, block, block + 1),) for block in range(chain.blocks)]
        return build_table(chain, menus, most_bytes, self.slots, trim=self.trim)
