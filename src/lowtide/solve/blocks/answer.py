"""From block tables to an answer: many nominal budgets asked of each table, the quickest real fit taken.

A table's own figures are upper bounds (bytes are rounded up, what crosses a cut is counted whole), so the sequence of a
nominal budget a little above the real one may fit. Tables are built for a ladder of budgets from keep-all's peak
down, the rungs fixed by the program alone; every table answers for its part of the range. The set of sequences thus
does not depend on the budget: more of it is never slower, and the lowest peak reported is reached when asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from lowtide.ir import schedule_from_sequence
from lowtide.solve.blocks.book import Book
from lowtide.solve.blocks.table import Table, spread
from lowtide.solve.keep_all import KeepAll
from lowtide.solve.model.compact import Indices, compact
from lowtide.solve.model.sweep import sweep
from lowtide.solve.model.tables import Tables, decode, encode_keep_all, make_tables
from lowtide.solve.outcome import answer
from lowtide.solve.problem import Problem, Solution

_RUNG = 0.6
_ASKED = 40

Found = tuple[int, int, Indices]
"""Recompute time, peak without ``fixed_bytes``, the sequence without its unused recomputes."""

Builder = Callable[[int], Table]
"""The table for budgets up to so many bytes, ``fixed_bytes`` apart."""


def solve_with_tables(name: str, problem: Problem, builders_of: Callable[[Book], Sequence[Builder]]) -> Solution:
    """The quickest schedule that fits; else unsolved with the lowest peak of all sequences."""
    began = time.perf_counter()
    model = compact(problem.graph, problem.costs)
    tables = make_tables(model)
    book = Book(model, tables)
    if not book.has_blocks:
        return KeepAll().solve(problem)
    kept = swept(tables, encode_keep_all(model))
    found = [kept, *(swept(tables, codes) for codes in table_sequences(builders_of(book), kept[1]))]
    room = problem.budget_bytes - problem.graph.fixed_bytes
    fitting = sorted((one for one in found if one[1] <= room), key=_quickest)[:6]
    chosen = [*fitting, min(found, key=lambda one: (one[1], one[0]))]
    schedules = [schedule_from_sequence(problem.graph, decode(model, codes)) for _, _, codes in chosen]
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
                yield from _above(builder, most_bytes)
            return
        yield table
        lowest = table.chain.constant_bytes + least * table.unit_bytes
        if table.unit_bytes == 1 or lowest >= 0.98 * room:
            return
        room = max(int(room * _RUNG), lowest)


def _above(builder: Builder, most_bytes: int) -> Iterator[Table]:
    for factor in (1.3, 2.0, 4.0):
        table = builder(int(most_bytes * factor))
        if table.least_slots() is not None:
            yield table
            return


def asked(table: Table) -> Iterator[Indices]:
    """The table's sequences for about fifty nominal budgets where its times change, most of them in the part of the
    range that no lower rung answers for."""
    times = table.best_ns[0, table.chain.blocks]
    least = table.least_slots()
    if least is None:
        return
    changes = least + np.flatnonzero(np.diff(times[least:], prepend=times[least] + 1))
    upper = changes[changes >= 0.55 * len(times)]
    for part, count in ((changes[changes < 0.55 * len(times)], _ASKED // 4), (upper, _ASKED)):
        if len(part):
            for slots in spread(part, count):
                yield table.codes(slots)


def swept(tables: Tables, codes: Indices) -> Found:
    """What the exact sweep says of a sequence."""
    found = sweep(tables, codes)
    return found.recompute_ns, found.peak_bytes, found.codes


def _quickest(found: Found) -> tuple[int, int]:
    return found[0], found[1]
