"""Starting points for the searches from the block programs, good where budgets are small.

The forward pass is cut in a few ways; each gives a chain, menus and one table; every table is asked for a few nominal
budgets around the real one, as rounding and shared storages make its own figures upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.solve.blocks.chain import make_chain
from lowtide.solve.blocks.compose import composed_chain
from lowtide.solve.blocks.menu import menus
from lowtide.solve.blocks.partition import articulation_cuts, refined_cuts, several_cuts, top_cuts
from lowtide.solve.blocks.table import Table, build_table
from lowtide.solve.model.compact import Compact, Indices
from lowtide.solve.model.tables import Tables, make_tables

_SLOTS = 400
_OPTIONS = 12
_NOMINAL = (0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.3)
_BUNDLES, _PART_NODES = 24, 12
_MOST_BLOCKS, _MOST_NODES = 60, 60


def block_sequences(model: Compact, budget_bytes: int, tables: Tables | None = None) -> Iterator[Indices]:
    """Encoded sequences whose peaks lie around ``budget_bytes`` (``fixed_bytes`` included), the end node kept."""
    room = budget_bytes - model.fixed_bytes
    if room <= 0 or model.boundary == 0 or model.boundary == model.nodes:
        return
    seen: set[bytes] = set()
    for table in block_tables(model, room, tables or make_tables(model)):
        for codes in near(table, room):
            if codes.tobytes() not in seen:
                seen.add(codes.tobytes())
                yield codes


def near(table: Table, room: int) -> Iterator[Indices]:
    """The table's sequences for nominal budgets around ``room``; its lowest where it knows none."""
    least = table.least_slots()
    if least is None:
        return
    asked = {max(table.slots(int(room * share)), least) for share in _NOMINAL}
    for slots in sorted(asked | {least}):
        yield table.codes(slots)


def block_tables(model: Compact, room: int, tables: Tables) -> Iterator[Table]:
    """One table per way to cut: composed bundles of any graph first, then blocks with menus of their own."""
    most = int(room * max(_NOMINAL))
    for tops in top_cuts(model, _BUNDLES, _PART_NODES):
        chain, composed = composed_chain(model, tables, tops, _PART_NODES, _OPTIONS)
        yield build_table(chain, composed, most, _SLOTS)
    ways = [refined_cuts(model, cuts, _MOST_NODES) for cuts in several_cuts(model, _MOST_BLOCKS)]
    ways.insert(0, refined_cuts(model, articulation_cuts(model, _MOST_BLOCKS), 2 * _MOST_NODES))
    for cuts in (cuts for index, cuts in enumerate(ways) if cuts not in ways[:index]):
        chain = make_chain(model, cuts, tables)
        yield build_table(chain, menus(chain, _OPTIONS), most, _SLOTS)
