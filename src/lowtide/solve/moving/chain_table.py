"""The dynamic program of ``pofo``: which blocks of a chain are saved, run again or moved, on a clock of two links.

Glossary (bytes; times in ns): ``M`` the budget for what is counted here; ``F_i``, ``B_i`` forward and backward time of block i;
``o_i`` and ``p_i`` the peaks of block i in both passes when all that it computes is saved, ``q(i, k)`` that of running block k
when the segment began with block i; ``s_i`` what block i saves, ``C_i`` what comes into it; ``T(m, i, j)`` rotor's time for
blocks i to j - 1, forward and backward, in m bytes (``lowtide.solve.blocks.table``); ``u``, ``v`` bytes per ns to the second
memory and back. Where blocks have a menu of options, saving is one case per option, whose recomputes count to ``B_i``.

A state stands before block i, with ``x`` bytes that were just made (``C_i`` or what block i - 1 saved), ``A`` that stay until
they are read in the backward pass, ``f`` that have yet to leave, and ``g`` that have to be back before the backward pass is
done with block i: it is followed from both ends of the step at once. Its time is that of everything outside of blocks i and
later. From there, and each of them with ``x`` kept (``A' = A + x``) or moved (``f' = f' + x, g' = g' + x``):

    save block i:         e = max(0, o_i + f + x + A - M),  d = max(0, p_i + g + x + A - M)
                          t' = t + F_i + B_i + e / u + d / v
                          f' = max(0, f - u F_i - e),  g' = max(0, g - v B_i - d)
    run i to j - 1 again: e = max over k of q(i, k) + f - u (F_i + ... + F_(k-1)) + x + A - M, at least 0;
                          r = g or r = 0 bytes are set aside for what comes back meanwhile;  T' = T(M - A - x - r, i, j)
                          t' = t + F_i + ... + F_(j-1) + e / u + T' + B_i + ... + B_(j-1) + (g - r) / v
                          f' = max(0, f - u (F_i + ... + F_(j-1)) - e),  g' = max(0, r - v (T' + B_i + ... + B_(j-1)))
    end with i to L - 1:  rotor runs them in M - A - x - r bytes, r = max(f, g) or 0; what was not set aside is waited for

States whose three figures fall into the same of ``cells`` parts each, and those that a quicker one with no more of any
undercuts, are one: exact figures are kept with the quickest, so that nothing is rounded up again and again. At most L^2 cells^3
steps, of which far fewer are reached.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.solve.blocks.table import Table
from lowtide.solve.model.compact import Numbers

Floats = npt.NDArray[np.float64]


class Segment(NamedTuple):
    """Blocks ``low .. high - 1``, run again in so many slots of the table, or one that is saved by its option ``~slots``.
    ``moved``: whether what came into it moves; ``first``: the block from which on that was made."""

    low: int
    high: int
    slots: int
    moved: bool
    first: int


class ChainCosts(NamedTuple):
    """What the recurrence reads: rotor's ``table``, ``room`` in bytes beside what is always there, rates in bytes per ns."""

    slots: int
    room: float
    unit_bytes: float
    leave_rate: float
    come_rate: float
    cells: int
    best_ns: Numbers
    crossing: Numbers
    forward_peak: Numbers
    start: Numbers
    saved: Numbers
    option_forward_peak: Numbers
    option_backward_peak: Numbers
    extra_ns: Numbers
    forward_ns: Floats
    backward_ns: Floats


def chain_costs(table: Table, budget_bytes: int, rates: tuple[float, float], cells: int) -> ChainCosts:
    """For ``budget_bytes``, ``fixed_bytes`` apart; ``rates``: bytes per ns to the second memory and back."""
    chain, costs, time_ns = table.chain, table.costs, table.chain.model.time_ns
    regions = [chain.region(block, block + 1) for block in range(chain.blocks)]
    return ChainCosts(
        slots=table.best_ns.shape[2],
        room=float(budget_bytes - chain.constant_bytes),
        unit_bytes=float(table.unit_bytes),
        leave_rate=rates[0],
        come_rate=rates[1],
        cells=cells,
        best_ns=table.best_ns,
        crossing=costs.crossing,
        forward_peak=costs.forward_peak,
        start=costs.start,
        saved=costs.saved,
        option_forward_peak=costs.option_forward_peak,
        option_backward_peak=costs.option_backward_peak,
        extra_ns=costs.extra_ns,
        forward_ns=np.array([float(time_ns[a:b].sum()) for a, b in zip(chain.cuts[:-1], chain.cuts[1:], strict=True)]),
        backward_ns=np.array([float(time_ns[first:last].sum()) for first, last in regions]),
    )


def quickest_way(costs: ChainCosts) -> tuple[float, list[Segment]] | None:
    """Its time in ns and its segments, in order; ``None`` where there is none."""
    time_ns, rows = core.chain_way(costs)
    segments = [Segment(low, high, slots, bool(moved), first) for low, high, slots, moved, first in rows.tolist()]
    return (time_ns, segments) if segments else None
