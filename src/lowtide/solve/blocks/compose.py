"""Composing menus upwards: the options of a part of the chain from those of its two halves.

With ``L`` and ``R`` the options of the left and the right half, an option of both runs R's backward codes, then L's,
each either on what the forward pass saved or after a re-run of its half's forward nodes (which of those are needed,
the measures tell). All pairs and all ways are measured, the Pareto-best thinned. Parts that are equal up to renaming
are composed once, with the times of the first; small parts also get the menu that a leaf would. This is the step of
H-Rockmate / HiRemate (Gusak et al., HAL 04403844) in which a solver chooses among the options of the level below; here
halves are joined by enumeration instead of a mixed-integer program.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lowtide.solve.blocks.chain import BlockSpan, Chain, make_chain, measure_options
from lowtide.solve.blocks.menu import Menu, Signature, everything, leaf_menu, menus, moved, signature, thinned
from lowtide.solve.blocks.partition import refined_cuts
from lowtide.solve.model.compact import CompactGraph, Indices
from lowtide.solve.model.structure import crossing_bytes

_WHOLE_NODES = 60  # parts of up to so many forward nodes get a menu of their own besides


class Composer:
    """Menus of parts of one chain, each distinct part solved once."""

    def __init__(self, chain: Chain, count: int) -> None:
        self.chain = chain
        self.count = count
        self.crossing = crossing_bytes(chain.model)
        self.known: dict[Signature, tuple[BlockSpan, Menu]] = {}

    def menu(self, low: int, high: int) -> Menu:
        """Options of blocks ``low .. high - 1``, about ``count`` of them."""
        key, span = signature(self.chain, low, high), self.chain.span(low, high)
        if key in self.known:
            source, known = self.known[key]
            return tuple(moved(source, span, codes) for codes in known)
        options: Menu = ()
        if high - low == 1 or span.high - span.low <= _WHOLE_NODES:
            options = leaf_menu(self.chain, [span], self.count)
        if high - low > 1:
            options = self._joined(low, self._middle(low, high), high, options)
        self.known[key] = (span, options)
        return options

    def _middle(self, low: int, high: int) -> int:
        """The cut of the middle half that fewest bytes cross."""
        quarter = (high - low) // 4
        inside = range(low + max(quarter, 1), high - max(quarter, 1) + 1)
        return min(inside, key=lambda cut: (int(self.crossing[self.chain.cuts[cut]]), abs(2 * cut - low - high)))

    def _joined(self, low: int, middle: int, high: int, known: Menu) -> Menu:
        """The best of ``known`` and of all pairs of options of the halves."""
        chain = self.chain
        span = chain.span(low, high)
        left, right = self._rerun(low, middle), self._rerun(middle, high)
        none = np.zeros(0, np.int32)
        both = np.concatenate([left, right])
        ways = [(none, none), (right, none), (none, left), (both, none), (both, left)]
        options = [everything(chain, low, high), *known]
        for first in self.menu(middle, high):
            for second in self.menu(low, middle):
                options += [np.concatenate([begin, first, between, second]) for begin, between in ways]
        return thinned(measure_options(chain.model, span, options), options, self.count)

    def _rerun(self, low: int, high: int) -> Indices:
        nodes = np.arange(self.chain.cuts[low], self.chain.cuts[high], dtype=np.int32)
        return ~nodes[self.chain.model.recomputable[nodes]]


ChainAndMenus = tuple[Chain, list[Menu]]


class BlockChains:
    """The chains of one program with their menus, each made once: planners cut in the same ways again."""

    def __init__(self, model: CompactGraph) -> None:
        self.model = model
        self._known: dict[tuple[object, ...], ChainAndMenus] = {}

    @property
    def has_blocks(self) -> bool:
        """Whether there is a forward and a backward pass."""
        return 0 < self.model.boundary < self.model.nodes

    def with_menus(self, cuts: Sequence[int], options: int) -> ChainAndMenus:
        """The chain of blocks between the cuts, and about ``options`` options of each."""
        key = ("blocks", *cuts, options)
        if key not in self._known:
            chain = make_chain(self.model, cuts)
            self._known[key] = chain, menus(chain, options)
        return self._known[key]

    def composed(self, tops: Sequence[int], part_nodes: int, options: int) -> ChainAndMenus:
        """The chain of bundles between the cuts ``tops``, with menus composed of parts of ``part_nodes`` nodes."""
        key = ("bundles", *tops, part_nodes, options)
        if key not in self._known:
            parts = make_chain(self.model, refined_cuts(self.model, list(tops), part_nodes))
            index = {cut: part for part, cut in enumerate(parts.cuts)}
            groups = [(index[a], index[b]) for a, b in itertools.pairwise(tops)]
            composer = Composer(parts, options)
            chain = make_chain(self.model, tops, [parts.starts[high - 1] for _, high in groups])
            self._known[key] = chain, [composer.menu(low, high) for low, high in groups]
        return self._known[key]
