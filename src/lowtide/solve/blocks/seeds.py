"""Starting points for the searches from the block programs, good where budgets are small.

The forward pass is cut in a few ways; each gives a chain, menus and several tables, whose slots differ in size; every
table is asked for nominal budgets around the real one. Rounding and shared storages make a table's own figures upper
bounds, by amounts that differ from table to table, so the best of many is better than any one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.solve.blocks.compose import BlockChains
from lowtide.solve.blocks.partition import articulation_cuts, distinct, refined_cuts, several_cuts, top_cuts
from lowtide.solve.blocks.table import Table, build_table, spread
from lowtide.solve.model.compact import Indices

_SLOTS = 400
_OPTIONS = 16
_ROOMS = (1.04, 1.12, 1.2, 1.3, 1.4, 1.5)  # of the tables, as shares of the budget
_LEAST, _ASKED = 0.9, 16  # nominal budgets from this share on, at most so many per table
_BUNDLES, _PART_NODES = 24, 12
_MOST_BLOCKS, _MOST_NODES = 60, 60


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
