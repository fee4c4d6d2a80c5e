"""From block tables to sequences: a table is asked for many nominal budgets, as its own figures are upper bounds, by
amounts that differ from table to table. The sequence of a budget a little above the real one may fit, and the best of
many tables is better than any.

For planners (``table_sequences``) tables are built for a ladder of budgets from keep-all's peak down, the rungs fixed by
the program alone, so that the set of sequences does not depend on the budget: more of it is never slower, and the lowest
peak reported is reached when asked for. As starting points for the searches (``block_sequences``) come those around one
budget, of several ways to cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import articulation_cuts, distinct, refined_cuts, several_cuts, top_cuts
from lowtide.solve.blocks.table import Table, build_table, spread
from lowtide.solve.model.compact import Indices

_RUNG = 0.6
_ABOVE = (1.3, 2.0, 4.0)
_RUNG_ASKED = 40
_SLOTS = 400
_OPTIONS = 16
_ROOMS = (1.04, 1.12, 1.2, 1.3, 1.4, 1.5)  # of the tables, as shares of the budget
_LEAST, _ASKED = 0.9, 16  # nominal budgets from this share on, at most so many per table
_BUNDLES, _PART_NODES = 24, 12
_MOST_BLOCKS, _MOST_NODES = 60, 60

Builder = Callable[[int], Table]
"""The table for budgets up to so many bytes, ``fixed_bytes`` apart."""


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
    for part, count in ((changes[~upper], _RUNG_ASKED // 4), (changes[upper], _RUNG_ASKED)):
        if len(part):
            for slots in spread(part, count):
                yield table.codes(slots)


def block_sequences(chains: BlockChains, budget_bytes: int) -> Iterator[Indices]:
    """Encoded sequences whose peaks lie around ``budget_bytes`` (``fixed_bytes`` included), the end node kept."""
    room = budget_bytes - chains.model.fixed_bytes
    if room <= 0 or not chains.has_blocks:
        return
    seen: set[bytes] = set()
    for table in block_tables(chains, room):
        for codes in near(table, room):
            if codes.tobytes() not in seen:
                seen.add(codes.tobytes())
                yield codes


def near(table: Table, room: int) -> Iterator[Indices]:
    """The table's sequences for nominal budgets around ``room``; its lowest where it knows none."""
    least = table.least_slots()
    if least is None:
        return
    changes = table.changes(max(table.slots(int(room * _LEAST)), least))
    for slots in sorted({least, *spread(changes, _ASKED)}):
        yield table.codes(slots)


def block_tables(chains: BlockChains, room: int) -> Iterator[Table]:
    """Some tables per way to cut: composed bundles of any graph first, then blocks with menus of their own."""
    model, mosts = chains.model, [int(room * share) for share in _ROOMS]
    for tops in top_cuts(model, _BUNDLES, _PART_NODES):
        chain, composed = chains.composed(tops, _PART_NODES, _OPTIONS)
        yield from (build_table(chain, composed, most, _SLOTS) for most in mosts)
    ways = [refined_cuts(model, cuts, _MOST_NODES) for cuts in several_cuts(model, _MOST_BLOCKS)]
    ways.insert(0, refined_cuts(model, articulation_cuts(model, _MOST_BLOCKS), 2 * _MOST_NODES))
    for cuts in distinct(ways):
        chain, options = chains.with_menus(cuts, _OPTIONS)
        yield from (build_table(chain, options, most, _SLOTS) for most in mosts)
