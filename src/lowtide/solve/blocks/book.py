"""The chains of one program with their menus, each made once, for planners that read the same ways to cut again."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.solve.blocks.chain import Chain, make_chain
from lowtide.solve.blocks.compose import composed_chain
from lowtide.solve.blocks.menu import Menu, menus
from lowtide.solve.model.compact import Compact
from lowtide.solve.model.tables import Tables

ChainAndMenus = tuple[Chain, list[Menu]]


class Book:
    """What was made of ``model`` so far, by cuts and sizes."""

    def __init__(self, model: Compact, tables: Tables) -> None:
        self.model = model
        self.tables = tables
        self._with_menus: dict[tuple[object, ...], ChainAndMenus] = {}
        self._composed: dict[tuple[object, ...], ChainAndMenus] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether there is a forward and a backward pass."""
        return 0 < self.model.boundary < self.model.nodes

    def chain(self, cuts: Sequence[int]) -> Chain:
        return make_chain(self.model, cuts, self.tables)

    def with_menus(self, cuts: Sequence[int], options: int) -> ChainAndMenus:
        """The chain of blocks between the cuts, and about ``options`` options of each."""
        key = (*cuts, options)
        if key not in self._with_menus:
            chain = self.chain(cuts)
            self._with_menus[key] = chain, menus(chain, options)
        return self._with_menus[key]

    def composed(self, tops: Sequence[int], part_nodes: int, options: int) -> ChainAndMenus:
        """The chain of bundles between the cuts ``tops``, with menus composed of parts of ``part_nodes`` nodes."""
        key = (*tops, part_nodes, options)
        if key not in self._composed:
            self._composed[key] = composed_chain(self.model, self.tables, tops, part_nodes, options)
        return self._composed[key]
