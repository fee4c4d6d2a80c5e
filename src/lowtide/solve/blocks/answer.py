"""From block tables to an answer: many nominal budgets asked of each table, the quickest real fit taken.

A table's own figures are upper bounds (bytes are rounded up, what crosses a cut is counted whole), so the sequence of a
nominal budget a little above the real one may fit. Tables are built for a ladder of budgets from keep-all's peak
down, the rungs fixed by the program alone; every table answers for its part of the range. The set of sequences thus
does not depend on the budget: more of it is never slower, and the lowest peak reported is reached when asked for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from lowtide.ir import schedule_from_sequence
from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.table import Table, spread
from lowtide.solve.keep_all import KeepAll
from lowtide.solve.model.candidate import lowest, quickest
from lowtide.solve.model.compact import Indices, compact, decode, encode_keep_all
from lowtide.solve.model.sweep import sweep
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution

_RUNG = 0.6
_ABOVE = (1.3, 2.0, 4.0)
_ASKED = 40
_SIMULATED = 6

Builder = Callable[[int], Table]
"""The table for budgets up to so many bytes, ``fixed_bytes`` apart."""


def solve_with_tables(name: str, problem: Problem, builders_of: Callable[[BlockChains], Sequence[Builder]]) -> Solution:
    """The quickest schedule that fits; else unsolved with the lowest peak of all sequences."""
    began = time.perf_counter()
    model = compact(problem.graph, problem.costs)
    chains = BlockChains(model)
    if not chains.has_blocks:
        return KeepAll().solve(problem)
    kept = sweep(model, encode_keep_all(model))
    found = [kept, *(sweep(model, codes) for codes in table_sequences(builders_of(chains), kept.peak_bytes))]
    room = problem.budget_bytes - problem.graph.fixed_bytes
    chosen = [*quickest((one for one in found if one.peak_bytes <= room), _SIMULATED), lowest(found)]
    schedules = [schedule_from_sequence(problem.graph, decode(model, one.codes)) for one in chosen]
    return answer(name, problem, schedules, began)


def table_sequences(builders: Sequence[Builder], most_bytes: int) -> Iterator[Indices]:
    """What all tables answer for budgets up to ``most_bytes``, ``fixed_bytes`` apart."""
    for builder in builders:
        for table in rungs(builder, most_bytes):
            yield from asked(table)


def rungs(builder: Builder, most_bytes: int) -> Iterator[Table]:
    """Tables for ``most_bytes``, 0.6 of that and so on while they know a schedule, and one right at the lowest."""
    room = most_bytes
    while room > 0:
        table = builder(room)
        least = table.least_slots()
        if least is None:
            if room == most_bytes:  # bytes that the chain counts too high: look above
                above = (builder(int(most_bytes * factor)) for factor in _ABOVE)
                yield from itertools.islice((table for table in above if table.least_slots() is not None), 1)
            return
        yield table
        lowest_bytes = table.chain.constant_bytes + least * table.unit_bytes
        if table.unit_bytes == 1 or lowest_bytes >= 0.98 * room:
            return
        room = max(int(room * _RUNG), lowest_bytes)


def asked(table: Table) -> Iterator[Indices]:
    """The table's sequences for about fifty nominal budgets where its times change, most of them in the part of the
    range that no lower rung answers for."""
    least = table.least_slots()
    if least is None:
        return
    changes = table.changes(least)
    upper = changes >= 0.55 * table.best_ns.shape[2]
    for part, count in ((changes[~upper], _ASKED // 4), (changes[upper], _ASKED)):
        if len(part):
            for slots in spread(part, count):
                yield table.codes(slots)
