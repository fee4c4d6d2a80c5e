"""Multipliers of one relaxation carried over to another with one more cut, as a start.

Rows and columns are matched by what they stand for. A gap that the new cut splits becomes a window of two gaps; the
rows that link it to its gaps then take over the time of its recomputes, so that the bound is about the same at once.
"""

from __future__ import annotations

import numpy as np

from lowtide.solve.bounds.dual import Dual, first_weight
from lowtide.solve.bounds.relaxation import Covering, Floats, IndexBlock


def transfer(old: Covering, dual: Dual, new: Covering, cost: Floats) -> Dual:
    """A start for ``new``; ``cost`` is the share of time of each node."""
    x = _match(old.column_blocks, dual.x, new.column_blocks, len(new.cost))
    y = _match(old.row_blocks, dual.y, new.row_blocks, len(new.right))
    old_links = [block for block in old.row_blocks if block.key[0] == "link"]
    matched = {block.key for block in old_links}
    gaps = set(zip(old.cuts, (*old.cuts[1:], cost.size), strict=True)) if old.cuts else set()
    for block in new.row_blocks:
        kind, begin, end = block.key
        if kind != "link" or block.key in matched or (begin, end) not in gaps:
            continue
        left = cost.copy()
        for link in old_links:
            if link.key[1] <= begin and end <= link.key[2]:
                left[link.members] -= dual.y[link.first : link.first + len(link.members)]
        y[block.first : block.first + len(block.members)] = np.maximum(left[block.members], 0.0)
    return Dual(dual.bound, x, y, first_weight(new))


def _match(old: tuple[IndexBlock, ...], values: Floats, new: tuple[IndexBlock, ...], size: int) -> Floats:
    """The values of the members that both have, 0 elsewhere."""
    known = {block.key: block for block in old}
    out = np.zeros(size)
    for block in new:
        before = known.get(block.key)
        if before is None or len(before.members) == 0 or len(block.members) == 0:
            continue
        at = np.minimum(np.searchsorted(before.members, block.members), len(before.members) - 1)
        same = before.members[at] == block.members
        out[block.first : block.first + len(block.members)][same] = values[before.first + at[same]]
    return out
