"""``pofo``: one dynamic program for rematerialization and offloading on a chain of blocks. Its recurrence, states and
discretisation are in ``lowtide.solve.moving.chain_table``.

Source: Beaumont, Eyraud-Dubois, Shilova, *Efficient Combination of Rematerialization and Offloading for Training DNNs*,
NeurIPS 2021 (POFO). As there, recomputed storages are not offloaded, storages are offloaded as soon as they are made and in
that order, and links are fluid (memory is free as soon as a part of a storage has left) and without latency. Deviations:

- states keep their exact figures, one state per cell of a grid, so the table is no proven optimum of the model either;
- while a segment is recomputed, either all of the memory for the fetched storages is reserved or none;
- recomputed segments are rotor's for the least memory that they have, and several storages may cross a cut.

A real link is not fluid. So several ways to cut, nominal budgets and slower links each give a schedule, whose transfers are
placed by the exact clock; the quickest of these and of rotor's that fits is the answer. No guarantee. Without a second
memory it is ``rotor``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.ir import keep_all_schedule
from lowtide.solve.block_programs import Rotor
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.model.compact import compact
from lowtide.solve.moving.chains import ChainPrograms
from lowtide.solve.moving.steps import decoded, program_of
from lowtide.solve.options import Options, between
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution


@dataclass(frozen=True, slots=True)
class Pofo(Options):
    """The planner ``pofo``. ``slots``: as for ``rotor``. ``blocks``: the most blocks; half, a quarter and so on of them are
    tried too. ``cells``: the parts of the budget by which states are distinguished."""

    slots: int = between(300, 1, 5000)
    blocks: int = between(40, 1, 200)
    cells: int = between(12, 1, 64)
    moves: ClassVar[bool] = True

    def search(self, problem: Problem) -> Solution:
        rotor = Rotor().solve(problem)
        found = rotor.schedules
        chains = BlockChains(compact(problem.graph, problem.costs))
        below_ns = rotor.time_ns if rotor.status.solved else None
        programs = ChainPrograms(problem, chains.model, program_of(problem.graph, problem.costs))
        rotors = Rotor(slots=self.slots, blocks=self.blocks)
        for builder in rotors.builders(chains) if chains.has_blocks else ():
            found += [decoded(steps) for steps, _ in programs.schedules(builder, self.cells, below_ns)]
        return answer(self.name, problem, [keep_all_schedule(problem.graph), *found])
