"""``rotor``, ``rockmate`` and ``h-rockmate``: a dynamic program over a chain of blocks with options each.

The forward pass is cut into blocks (``lowtide.solve.blocks.partition``), every block gets options, and a table
(``lowtide.solve.blocks.table``, with the recurrence) chooses among them. All are heuristics: feasible or unsolved. Several
nominal budgets are tried (``lowtide.solve.blocks.sequences``). For L blocks, K options, M slots a table takes
O(L^3 M + L^2 K M) time. ``docs/planners/blocks.md`` has the sources and what is done otherwise than there.
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

_BLOCKS = 60  # of rockmate
_SIMULATED = 6


class BlockProgram(Options):
    """What the three planners share: only their tables differ."""

    __slots__ = ()

    @abstractmethod
    def builders(self, chains: BlockChains) -> list[Builder]:
        """The tables, one builder per way to cut."""

    def search(self, problem: Problem) -> Solution:
        """The quickest schedule that fits; else unsolved with the lowest peak of all sequences."""
        return quickest_fitting(self.name, problem, self._sequences, _SIMULATED)

    def _sequences(self, model: CompactGraph) -> Iterator[Indices]:
        chains = BlockChains(model)
        if chains.has_blocks:
            yield from table_sequences(self.builders(chains), sweep(model, encode_keep_all(model)).peak_bytes)


@dataclass(frozen=True, slots=True)
class Rotor(BlockProgram):
    """Blocks between articulation points modulo cheap long-lived storages; a block either saves everything or the chain
    stores a block's input and runs on (Beaumont et al. 2019, arXiv 1911.13214). On a chain with exact bytes the table's time is
    the least of any memory-persistent schedule (what is stored stays until its backward use) that treats blocks so.

    ``slots``: memory is counted in so many parts of the budget, rounded up; 0 counts bytes. ``trim``: the last forward of a
    nested segment runs without its output, which nobody needs again. ``blocks``: at most so many, the quickest neighbours
    merged; half, a quarter and so on of them are tried too.
    """

    slots: int = between(500, 0, 5000)
    trim: bool = True
    blocks: int = between(80, 1, 200)

    def builders(self, chains: BlockChains) -> list[Builder]:
        return [partial(self.table, make_chain(chains.model, cuts)) for cuts in several_cuts(chains.model, self.blocks)]

    def table(self, chain: Chain, most_bytes: int) -> Table:
        """One table for every budget up to ``most_bytes`` (``fixed_bytes`` apart)."""
        menus = [(everything(chain, block, block + 1),) for block in range(chain.blocks)]
        return build_table(chain, menus, most_bytes, self.slots, trim=self.trim)


@dataclass(frozen=True, slots=True)
class Rockmate(BlockProgram):
    """Blocks as for ``rotor``; every distinct block gets a menu of (saved bytes, peaks, time) options, from everything
    saved to nothing (``lowtide.solve.blocks.menu``), which takes O(n^3) for n nodes (Zhao et al. 2023, arXiv 2307.01236).

    ``options``: per block, about. ``slots``: as for ``rotor``. ``block_nodes``: above so many forward nodes a block
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
    """Any graph is cut into parts of a few nodes where fewest bytes cross, whatever crosses, and these are bundled; each
    bundle's menu is made from its halves', equal parts once (``lowtide.solve.blocks.compose``), and the table chooses among the
    bundles' options (Gusak et al., H-Rockmate, HAL 04403844, and HiRemate, ICML 2025). For n nodes in parts of p nodes menus
    take about O(n p^2 + n K^2 log n) steps of a sweep.

    ``options``: per part, about. ``part_nodes``: forward nodes of the smallest parts, at most. ``top``: bundles at
    the top level, about. ``slots``: as for ``rotor``.
    """

    options: int = between(16, 2, 100)
    part_nodes: int = between(12, 1, 100)
    top: int = between(24, 1, 100)
    slots: int = between(500, 0, 5000)

    def builders(self, chains: BlockChains) -> list[Builder]:
        """Menus composed once per way to bundle, tables of the chain of bundles as they are asked for."""
        ways = top_cuts(chains.model, self.top, self.part_nodes)
        composed = (chains.composed(tops, self.part_nodes, self.options) for tops in ways)
        return [partial(build_table, *chain_and_menus, slots=self.slots) for chain_and_menus in composed]
