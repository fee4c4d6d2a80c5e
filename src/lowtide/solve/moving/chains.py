"""Schedules of ``pofo``: what its program decides on several cuttings and budgets, with transfers placed by the clock."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from lowtide.ir import Schedule, SecondMemory, schedule_from_sequence
from lowtide.solve.blocks.chain import Chain
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import articulation_cuts, refined_cuts, top_cuts
from lowtide.solve.blocks.sequences import Builder
from lowtide.solve.blocks.table import Table, build_table
from lowtide.solve.model.compact import CompactGraph, Indices, decode
from lowtide.solve.model.ragged import rows
from lowtide.solve.model.split import movable_storages, split
from lowtide.solve.model.sweep import sweep
from lowtide.solve.moving.chain_table import ChainCosts, Segment, chain_costs, quickest_way
from lowtide.solve.moving.steps import Program, Run, Steps, encoded, place_steps, run_steps
from lowtide.solve.problem import Problem
from lowtide.solve.threads import in_threads

_NOMINAL = (0.85, 1.0, 1.05, 1.1, 1.2, 1.3)  # budgets that the program is asked for, as it counts bytes another way
# Parts of the link that the program is told of: what is good on a slow one is on a quick one.
_LINKS = (1.0, 0.3, 0.1, 1e-9)
_BLOCKS, _BUNDLES, _PART_NODES, _BLOCK_NODES = 32, 24, 12, 60
_OPTIONS, _SLOTS = 12, 300


def menu_builders(chains: BlockChains) -> list[Builder]:
    """Tables of rockmate and of h-rockmate: blocks that may save less than everything."""
    cuts = refined_cuts(chains.model, articulation_cuts(chains.model, _BLOCKS), _BLOCK_NODES)
    ways = [chains.with_menus(cuts, _OPTIONS)]
    ways += [chains.composed(tops, _PART_NODES, _OPTIONS) for tops in top_cuts(chains.model, _BUNDLES, _PART_NODES)[:2]]
    return [partial(build_table, chain, menus, slots=_SLOTS) for chain, menus in ways]


@dataclass(eq=False)
class ChainPrograms:
    """Schedules of one problem's chains; ``model`` is the graph's, which they are cut from."""

    problem: Problem
    model: CompactGraph
    program: Program

    def schedules(self, builder: Builder, cells: int, below_ns: int | None = None) -> list[tuple[Steps, Run]]:
        """One schedule per nominal budget and link for the table, transfers placed, those over the budget left out; where all
        are, the lowest. Empty without a second memory. ``below_ns``: those that compute as long as that are left out."""
        problem, memory = self.problem, self.problem.costs.second_memory
        room = problem.budget_bytes - problem.graph.fixed_bytes
        if memory is None or room <= 0:
            return []
        table = builder(int(max(_NOMINAL) * room))
        ways = in_threads(quickest_way, _asked(table, room, memory, cells))
        found = list[tuple[int, Steps]]()
        for segments in dict.fromkeys(tuple(way[1]) for way in ways if way is not None):
            codes = np.array(_codes(table, segments), np.int32)
            if below_ns is None or self.model.least_ns + sweep(self.model, codes).recompute_ns < below_ns:
                steps = encoded(self._schedule(table.chain, segments, codes))
                found.append((run_steps(self.program, steps).peak_bytes, steps))
        fitting = [steps for peak, steps in found if peak <= problem.budget_bytes]
        chosen = fitting or [steps for _, steps in sorted(found, key=lambda one: one[0])[:1]]
        return [place_steps(self.program, steps, problem.budget_bytes) for steps in chosen]

    @cached_property
    def _storages(self) -> list[int]:
        """Storage of the model -> that of the graph."""
        nodes = {*self.model.op_of_node.tolist()}
        return [storage.id for storage in self.problem.graph.storages if storage.base in nodes]

    @cached_property
    def _movable(self) -> set[int]:
        return {*movable_storages(self.problem.graph, self.problem.costs)}

    @cached_property
    def _reads(self) -> dict[int, list[int]]:
        """Op -> the storages that its node reads."""
        read = rows(self.model.reads_start, self.model.reads)
        ops = self.model.op_of_node.tolist()
        return {op: [self._storages[index] for index in read[node]] for node, op in enumerate(ops)}

    def _schedule(self, chain: Chain, segments: Sequence[Segment], codes: Indices) -> Schedule:
        """The schedule of some segments, in which what moves leaves as soon as it was computed and comes back just before it is
        read in the backward pass."""
        graph, costs, memory = self.problem.graph, self.problem.costs, self.problem.costs.second_memory
        assert memory is not None, "segments move to a second memory"
        leaving = (self._storages[index] for index in _moved(chain, segments, codes))
        sizes = ((one, int(costs.storage_bytes[one])) for one in leaving if one in self._movable)
        moved = {*memory.held(sizes)}
        parts = split(graph, costs, dict.fromkeys(sorted(moved), 0))
        computes, fetches = parts.computes, parts.fetches
        sequence: list[int] = []
        seen: set[int] = set()
        for op in decode(self.model, codes):
            for storage in self._reads[op] if len(seen) >= self.model.boundary else ():
                if storage in moved:
                    sequence.append(fetches[storage])
                    moved.discard(storage)
            sequence.append(computes[op])
            if op not in seen:
                sequence += [fetches[storage] for storage in parts.owned[op] if storage in fetches]
            seen.add(op)
        return parts.schedule(schedule_from_sequence(parts.graph, sequence))


def _asked(table: Table, room: int, memory: SecondMemory, cells: int) -> list[ChainCosts]:
    """For several nominal budgets, and links that are slower than that of the memory, as they are taken for fluid."""
    links = memory.offload_bytes_per_second / 1e9, memory.fetch_bytes_per_second / 1e9
    return [
        chain_costs(table, int(share * room), (part * links[0], part * links[1]), cells)
        for part, share in itertools.product(_LINKS, _NOMINAL)
    ]


def _codes(table: Table, segments: Sequence[Segment]) -> list[int]:
    """Forward through all segments, then backward."""
    chain = table.chain
    last = segments[-1]
    ends = last.high == chain.blocks and last.slots >= 0
    codes = [*range(chain.cuts[last.low if ends else chain.blocks])]
    for low, high, slots, _, _ in reversed(segments):
        codes += table.menus[low][~slots].tolist() if slots < 0 else table.part(low, high, slots)
    return codes


def _moved(chain: Chain, segments: Sequence[Segment], codes: Indices) -> list[int]:
    """Storages of the model that move, in the order in which they leave: of what came into a segment, all that the next block
    reads, and all that the saved block reads again before it makes it again."""
    model = chain.model
    again = {storage for code in codes.tolist() if code < 0 for storage in model.owns_of(~code).tolist()}
    found: list[int] = []
    for before, segment in zip(segments[:-1], segments[1:], strict=True):
        if segment.moved:
            made = (chain.producer >= segment.first) & (chain.producer < segment.low)
            read = chain.last_use >= 0 if before.slots < 0 else chain.until >= segment.low
            found += [storage for storage in np.flatnonzero(made & read).tolist() if storage not in again]
    return found
