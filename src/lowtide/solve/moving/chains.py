"""Schedules of ``pofo``: what its program decides on several cuttings and budgets, with transfers placed by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lowtide.ir import Compute, Schedule, SecondMemory, schedule_from_sequence, simulate
from lowtide.solve.block_programs import Rotor
from lowtide.solve.blocks.chain import Chain, make_chain
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import articulation_cuts, refined_cuts, several_cuts, top_cuts
from lowtide.solve.blocks.sequences import Builder
from lowtide.solve.blocks.table import Table, build_table
from lowtide.solve.model.compact import decode
from lowtide.solve.model.split import movable_storages, split
from lowtide.solve.moving.chain_table import ChainTable, Segment
from lowtide.solve.moving.placing import place_transfers
from lowtide.solve.problem import Problem

_NOMINAL = (0.85, 1.0, 1.05, 1.1, 1.2, 1.3)  # budgets that the program is asked for, as it counts bytes another way
_BLOCKS, _BUNDLES, _PART_NODES, _BLOCK_NODES = 32, 24, 12, 60
_OPTIONS, _SLOTS = 12, 300


def pofo_builders(chains: BlockChains, blocks: int = 40, slots: int = 300) -> list[Builder]:
    """Tables of rotor, one per way to cut."""
    if not chains.has_blocks:
        return []
    rotor = Rotor(slots=slots)
    return [partial(rotor.table, make_chain(chains.model, cuts)) for cuts in several_cuts(chains.model, blocks)]


def menu_builders(chains: BlockChains) -> list[Builder]:
    """Tables of rockmate and of h-rockmate: blocks that may save less than everything."""
    if not chains.has_blocks:
        return []
    cuts = refined_cuts(chains.model, articulation_cuts(chains.model, _BLOCKS), _BLOCK_NODES)
    ways = [chains.with_menus(cuts, _OPTIONS)]
    ways += [chains.composed(tops, _PART_NODES, _OPTIONS) for tops in top_cuts(chains.model, _BUNDLES, _PART_NODES)[:2]]
    return [partial(build_table, chain, menus, slots=_SLOTS) for chain, menus in ways]


def chain_schedules(
    problem: Problem, builders: Sequence[Builder], cells: int, below_ns: int | None = None
) -> list[Schedule]:
    """One schedule per table and nominal budget, transfers placed, those over the budget left out; where all are, the lowest.
    Empty without a second memory. ``below_ns``: those that compute as long as that are left out."""
    if problem.costs.second_memory is None or problem.budget_bytes <= problem.graph.fixed_bytes:
        return []
    found: dict[Schedule, None] = {}
    room = problem.budget_bytes - problem.graph.fixed_bytes
    for builder in builders:
        table = builder(int(max(_NOMINAL) * room))
        for budget in (int(share * room) for share in _NOMINAL):
            segments = chain_program(table, problem.costs.second_memory, budget, cells).solve()
            if segments is not None:
                found[_schedule(problem, table, segments)] = None
    peaks = {one: simulate(problem.graph, problem.costs, one).peak_bytes for one in found}
    fitting = [one for one, peak in peaks.items() if peak <= problem.budget_bytes]
    chosen = fitting or sorted(peaks, key=lambda one: peaks[one])[:1]
    times = problem.costs.time_ns.tolist()
    if below_ns is not None:
        computing = {one: sum(times[step.op] for step in one.steps if isinstance(step, Compute)) for one in chosen}
        chosen = [one for one in chosen if computing[one] < below_ns]
    return [*dict.fromkeys(place_transfers(problem.graph, problem.costs, one, problem.budget_bytes) for one in chosen)]


def chain_program(table: Table, memory: SecondMemory, budget_bytes: int, cells: int) -> ChainTable:
    """The dynamic program for a budget, ``fixed_bytes`` apart."""
    chain, time_ns = table.chain, table.chain.model.time_ns
    regions = [chain.region(block, block + 1) for block in range(chain.blocks)]
    return ChainTable(
        table,
        budget_bytes,
        memory.offload_bytes_per_second / 1e9,
        memory.fetch_bytes_per_second / 1e9,
        cells,
        np.array([float(time_ns[first:last].sum()) for first, last in regions]),
        np.array([float(time_ns[a:b].sum()) for a, b in zip(chain.cuts[:-1], chain.cuts[1:], strict=True)]),
    )


def _schedule(problem: Problem, table: Table, segments: Sequence[Segment]) -> Schedule:
    """The schedule of some segments, in which what moves leaves as soon as it was computed and comes back just before it is
    read in the backward pass."""
    graph, costs, chain = problem.graph, problem.costs, table.chain
    model, memory = chain.model, costs.second_memory
    assert memory is not None, "segments move to a second memory"
    codes = _codes(table, segments)
    ops = decode(model, np.array(codes, np.int32))
    storage_of = sorted(s.id for s in graph.storages if s.base is not None and s.base in set(model.op_of_node.tolist()))
    movable = {*movable_storages(graph, costs)}
    leaving = (storage_of[index] for index in _moved(chain, segments, codes))
    moved = {*memory.held((one, int(costs.storage_bytes[one])) for one in leaving if one in movable)}
    parts = split(graph, costs, dict.fromkeys(sorted(moved), 0))
    computes, fetches = parts.computes, parts.fetches
    node_of = {int(op): node for node, op in enumerate(model.op_of_node)}
    sequence: list[int] = []
    seen: set[int] = set()
    for op in ops:
        backward = len(seen) >= model.boundary
        for storage in (storage_of[index] for index in model.reads_of(node_of[op]) if backward):
            if storage in moved:
                sequence.append(fetches[storage])
                moved.discard(storage)
        sequence.append(computes[op])
        if op not in seen:
            sequence += [fetches[storage] for storage in parts.owned[op] if storage in fetches]
        seen.add(op)
    return parts.schedule(schedule_from_sequence(parts.graph, sequence))


def _codes(table: Table, segments: Sequence[Segment]) -> list[int]:
    """Forward through all segments, then backward."""
    chain = table.chain
    last = segments[-1]
    ends = last.high == chain.blocks and last.slots >= 0
    codes = [*range(chain.cuts[last.low if ends else chain.blocks])]
    for low, high, slots, _, _ in reversed(segments):
        codes += table.menus[low][~slots].tolist() if slots < 0 else table.part(low, high, slots)
    return codes


def _moved(chain: Chain, segments: Sequence[Segment], codes: Sequence[int]) -> list[int]:
    """Storages of the model that move, in the order in which they leave: of what came into a segment, all that the next block
    reads, and all that the saved block reads again before it makes it again."""
    model = chain.model
    again = {storage for code in codes if code < 0 for storage in model.owns_of(~code).tolist()}
    found: list[int] = []
    for before, segment in zip(segments[:-1], segments[1:], strict=True):
        if segment.moved:
            made = (chain.producer >= segment.first) & (chain.producer < segment.low)
            read = chain.last_use >= 0 if before.slots < 0 else chain.until >= segment.low
            found += [storage for storage in np.flatnonzero(made & read).tolist() if storage not in again]
    return found
