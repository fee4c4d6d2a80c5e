"""``pofo``: rematerialization and offloading on a chain of blocks by one dynamic program, whose recurrence, states and
discretisation stand in ``lowtide.solve.moving.chain_table``.

Source: Beaumont, Eyraud-Dubois, Shilova, *Efficient Combination of Rematerialization and Offloading for Training DNNs*,
NeurIPS 2021 (POFO). As there, nothing moves that was computed again, what moves leaves as soon as it was made and in that
order, links are fluid (any part of a storage that has left is free) and know no latency. Deviations:

- states are kept with their exact figures, one per cell of a grid, so the table is no proven optimum of the model either;
- while a segment runs again, what comes back has either all of its room set aside or none;
- segments that run again are rotor's for the least memory that they have, and what crosses a cut may be several storages.

A real link is not fluid: each of several cuttings, nominal budgets and slower links gives a schedule, whose transfers are
placed by the exact clock, and the quickest of these and of rotor's that fits is the answer. No guarantee. Without a second
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
    """``slots``: of rotor's table. ``blocks``: at most so many; half, a quarter and so on of them are tried too. ``cells``:
    parts of the budget in which states are told apart."""

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
