"""``rotor``, ``rockmate`` and ``h-rockmate``: dynamic programs over a chain of blocks, each with a menu of options.

The forward pass is cut into blocks (``lowtide.solve.blocks.partition``), every block gets options, and a dynamic program
(``lowtide.solve.blocks.table``, with the recurrence) chooses among them. All are heuristics: feasible or unsolved. Several
nominal budgets are tried (``lowtide.solve.blocks.sequences``). For L blocks, K options, M slots a table takes
O(L^3 M + L^2 K M) time. ``docs/planners/blocks.md`` has the sources and the deviations from them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from lowtide.solve.blocks.chain import Chain, make_chain
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.menu import everything
from lowtide.solve.blocks.partition import distinct, refined_cuts, several_cuts, top_cuts
from lowtide.solve.blocks.sequences import Builder, table_sequences
from lowtide.solve.blocks.table import Table, build_table
from lowtide.solve.model.compact import CompactGraph, Indices, encode_keep_all
from lowtide.solve.model.sweep import sweep
from lowtide.solve.options import Options, between
from lowtide.solve.outcome import quickest_fitting
from lowtide.solve.problem import Problem, Solution

_BLOCKS = 60  # the most blocks of rockmate
_SIMULATED = 6


class BlockProgram(Options):
    """Base of the three planners, which differ only in their tables."""

    __slots__ = ()

    @abstractmethod
    def builders(self, chains: BlockChains) -> list[Builder]:
        """Return one table builder per way to cut."""

    def search(self, problem: Problem) -> Solution:
        """Return the quickest schedule that fits, else ``UNSOLVED`` with the lowest peak of all sequences."""
        return quickest_fitting(self.name, problem, self._sequences, _SIMULATED)

    def _sequences(self, model: CompactGraph) -> Iterator[Indices]:
        chains = BlockChains(model)
        if chains.has_blocks:
            yield from table_sequences(self.builders(chains), sweep(model, encode_keep_all(model)).peak_bytes)


@dataclass(frozen=True, slots=True)
class Rotor(BlockProgram):
    """The planner ``rotor`` (Beaumont et al. 2019, arXiv 1911.13214). Blocks lie between articulation points, ignoring cheap
    long-lived storages. Each block either saves everything, or only its input is stored and it is run again. On a chain with
    exact bytes the table's time is the least of any memory-persistent schedule (stored values stay until their backward use)
    under this rule.

    ``slots``: number of memory units that the budget is divided into (sizes are rounded up); 0 counts bytes. ``trim``: run the
    last forward of a nested segment without its output, which is not needed again. ``blocks``: the most blocks, the quickest
    neighbours merged; half, a quarter and so on of them are tried too.
    """

    slots: int = between(500, 0, 5000)
    trim: bool = True
    blocks: int = between(80, 1, 200)

    def builders(self, chains: BlockChains) -> list[Builder]:
        return [partial(self.table, make_chain(chains.model, cuts)) for cuts in several_cuts(chains.model, self.blocks)]

    def table(self, chain: Chain, most_bytes: int) -> Table:
        """Build one table for every budget up to ``most_bytes`` (without ``fixed_bytes``)."""
        menus = [(everything(chain, block, block + 1),) for block in range(chain.blocks)]
        return build_table(chain, menus, most_bytes, self.slots, trim=self.trim)


@dataclass(frozen=True, slots=True)
class Rockmate(BlockProgram):
    """The planner ``rockmate`` (Zhao et al. 2023, arXiv 2307.01236). Blocks as for ``rotor``; every distinct block gets a menu
    of (saved bytes, peaks, time) options, from everything saved to nothing (``lowtide.solve.blocks.menu``), in O(n^3) for n
    nodes.

    ``options``: approximate number per block. ``slots``: as for ``rotor``. ``block_nodes``: a block with more forward nodes
    is cut again before its menu is made; half as many are tried too.
    """

    options: int = between(16, 2, 200)
    slots: int = between(500, 0, 5000)
    block_nodes: int = between(120, 4, 200)

    def builders(self, chains: BlockChains) -> list[Builder]:
        sizes = (self.block_nodes, max(self.block_nodes // 2, 1))
        cuts = several_cuts(chains.model, _BLOCKS)
        ways = distinct([refined_cuts(chains.model, way, most_nodes) for way in cuts for most_nodes in sizes])
        return [partial(build_table, *chains.with_menus(way, self.options), slots=self.slots) for way in ways]


@dataclass(frozen=True, slots=True)
class HRockmate(BlockProgram):
    """The planner ``h-rockmate`` (Gusak et al., H-Rockmate, HAL 04403844, and HiRemate, ICML 2025). Cuts any graph into parts
    of a few nodes where the fewest bytes cross, and groups the parts into bundles. Each bundle's menu is composed from those
    of its halves, equal parts only once (``lowtide.solve.blocks.compose``), and the table chooses among the bundles' options.
    For n nodes in parts of p nodes menus take about O(n p^2 + n K^2 log n) steps of a sweep.

    ``options``: approximate number per part. ``part_nodes``: the most forward nodes of the smallest parts. ``top``:
    approximate number of bundles at the top level. ``slots``: as for ``rotor``.
    """

    options: int = between(16, 2, 100)
    part_nodes: int = between(12, 1, 100)
    top: int = between(24, 1, 100)
    slots: int = between(500, 0, 5000)

    def builders(self, chains: BlockChains) -> list[Builder]:
        """Compose the menus once per way to bundle; the builders make the tables when called."""
        ways = top_cuts(chains.model, self.top, self.part_nodes)
        composed = (chains.composed(tops, self.part_nodes, self.options) for tops in ways)
        return [partial(build_table, *chain_and_menus, slots=self.slots) for chain_and_menus in composed]
