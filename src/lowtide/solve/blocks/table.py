"""The dynamic program over a chain of blocks with a menu of options each. One table answers every smaller budget.

Glossary (bytes in slots, rounded up; times in ns): ``T(m, a, b)`` the least time to run blocks ``a .. b - 1`` forward
and backward when ``C_a`` is stored and ``m`` slots are free for everything else; ``F_i`` forward time; ``c(a, j)`` the
bytes that ``C_j`` adds to ``C_a``; of option ``k``: ``s`` saved bytes, ``f`` forward time, ``e`` recompute time.

    T(m, a, b)     = min( min over a < j < b of  sum of F_i over a .. j - 1  +  T(m - c(a, j), j, b)  +  T(m, a, j),
                          min over k of          f_a^k + e_a^k + T(m - s_a^k, a + 1, b) )
    T(m, a, a + 1) = min over k of  f_a^k + e_a^k

each only where the forward and backward peaks fit in ``m``. This is the recurrence of Rotor (Beaumont et al. 2019,
arXiv 1911.13214) with the options of Rockmate (Zhao et al. 2023, arXiv 2307.01236). With
``trim`` the last forward of a nested segment, whose output nobody needs again, is run without it. Gradients that are
there while a segment runs again are counted at the time at which that is.

O(L^3 M + L^2 K M) time, O(L^2 M) memory for L blocks, K options, M slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import PlanError
from lowtide.native import core
from lowtide.solve.blocks.chain import Chain, Measures, measure_options
from lowtide.solve.blocks.menu import Menu
from lowtide.solve.model.compact import Indices, Numbers

_NEVER = 2**61
_ENTRIES = 60_000_000


class TableCosts(NamedTuple):
    """What the recurrence reads; bytes in slots. Ragged by block: options ``start[i] .. start[i + 1] - 1``."""

    forward_ns: Numbers  # block
    crossing: Numbers  # a, j
    forward_peak: Numbers  # a, j: running blocks a .. j - 1, nothing kept but C_j
    gradients: Numbers  # b: bytes there when blocks before b run again
    start: Numbers
    saved: Numbers
    option_forward_peak: Numbers
    option_backward_peak: Numbers
    rerun_ns: Numbers
    extra_ns: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """``best_ns[a, b, m]`` and how: ``choice`` is a cut ``j`` as ``j`` or an option ``k`` of block ``a`` as ``~k``."""

    chain: Chain
    menus: tuple[Menu, ...]
    costs: TableCosts
    best_ns: Numbers
    choice: Indices
    unit_bytes: int

    def slots(self, budget_bytes: int) -> int:
        """Free slots under a budget; negative where nothing is free."""
        free = (budget_bytes - self.chain.constant_bytes) // self.unit_bytes
        return min(free, int(self.best_ns.shape[2]) - 1)

    def time_ns(self, budget_bytes: int) -> int | None:
        """The table's time for a budget, ``None`` where it knows no schedule."""
        free = self.slots(budget_bytes)
        found = _NEVER if free < 0 else int(self.best_ns[0, self.chain.blocks, free])
        return None if found >= _NEVER else found

    def least_slots(self) -> int | None:
        """The fewest slots with a schedule."""
        fitting = np.flatnonzero(self.best_ns[0, self.chain.blocks] < _NEVER)
        return int(fitting[0]) if len(fitting) else None

    def changes(self, first: int) -> Numbers:
        """The numbers of slots from ``first`` on at which the time changes, ``first`` included."""
        times = self.best_ns[0, self.chain.blocks, first:]
        return first + np.flatnonzero(np.diff(times, prepend=times[0] + 1))

    def codes(self, slots: int) -> Indices:
        """The encoded sequence behind the entry for so many free slots, which has to exist."""
        return np.array([*self.part(0, self.chain.blocks, slots), self.chain.model.nodes], np.int32)

    def part(self, low: int, high: int, slots: int) -> list[int]:
        """Codes of blocks ``low .. high - 1``, forward and backward, as of an entry that has to exist; the forward nodes run
        again where these are not the last blocks."""
        chain, model = self.chain, self.chain.model
        codes: list[int] = []
        waiting: list[tuple[int, int, int] | Indices] = [(low, high, slots)]
        while waiting:
            item = waiting.pop()
            if not isinstance(item, tuple):
                codes.extend(item.tolist())
                continue
            low, high, free = item
            choice = int(self.choice[low, high, free])
            middle = choice if choice >= 0 else low + 1
            nodes = range(chain.cuts[low], chain.cuts[middle])
            if high == chain.blocks:
                codes.extend(nodes)
            else:
                codes.extend(~node for node in nodes if model.recomputable[node])
            if choice >= 0:
                taken = int(self.costs.crossing[low, middle])
                waiting += [(low, middle, free), (middle, high, free - taken)]
            else:
                option = self.menus[low][~choice]
                waiting.append(option)
                if middle < high:
                    waiting.append((middle, high, free - int(self.costs.saved[self.costs.start[low] + ~choice])))
        return codes


def spread(values: Numbers, count: int) -> list[int]:
    """At most ``count`` of the values, evenly spread, the first and the last among them."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).astype(int))
    return [int(value) for value in values[chosen]]


def build_table(chain: Chain, menus: Sequence[Menu], most_bytes: int, slots: int, *, trim: bool = True) -> Table:
    """The table for every budget up to ``most_bytes``; ``slots`` = 0 counts bytes exactly.

    Raises ``PlanError`` where the exact table would be too large.
    """
    room = max(most_bytes - chain.constant_bytes, 1)
    measures = [measure_options(chain.model, chain.span(i, i + 1), menu) for i, menu in enumerate(menus)]
    unit = max(-(-room // slots), 1) if slots else _exact_unit(chain)
    size = room // unit + 1
    entries = (chain.blocks + 1) ** 2 * size
    if entries > _ENTRIES:
        raise PlanError(
            f"a block table of {entries:,} entries is above {_ENTRIES:,}: {size:,} slots for {chain.blocks} blocks; "
            f"round bytes up to fewer slots, for instance 'rotor{{slots=500}}'"
        )
    costs = _table_costs(chain, measures, unit, trim)
    best, choice = core.fill_table(*costs, size)
    return Table(chain, tuple(menus), costs, best, choice, unit)


def _exact_unit(chain: Chain) -> int:
    """The greatest common divisor of all sizes."""
    model = chain.model
    numbers = [*model.storage_bytes, *model.workspace_bytes, chain.constant_bytes, *chain.before, *chain.during]
    return max(int(np.gcd.reduce(np.array(numbers, np.int64))), 1)


def _table_costs(chain: Chain, measures: list[Measures], unit: int, trim: bool) -> TableCosts:
    model, blocks = chain.model, chain.blocks
    time = np.where(model.recomputable, model.time_ns, 0)
    forward = np.array([time[a:b].sum() for a, b in zip(chain.cuts[:-1], chain.cuts[1:], strict=True)], np.int64)
    crossing = chain.crossing_bytes()
    peaks = np.zeros((blocks + 1, blocks + 1), np.int64)
    nothing = np.zeros(0, np.int32)
    spans = [chain.span(block, block + 1) for block in range(blocks)]
    unread = [span._replace(late=np.zeros_like(span.late)) for span in spans]  # nothing stays for later regions
    alone = np.array([measure_options(model, span, [nothing]).forward_peak_bytes[0] for span in unread])
    for low in range(blocks):
        peaks[low, low + 1 :] = np.maximum.accumulate(crossing[low, low:-1] + alone[low:])
    gradients = [0, *(chain.before[chain.starts[block]] for block in range(blocks))]
    options = [len(found.extra_ns) for found in measures]
    flat = Measures(*map(np.concatenate, zip(*measures, strict=True)))

    def up(values: npt.ArrayLike) -> Numbers:
        return -(-np.asarray(values, np.int64) // unit)

    return TableCosts(
        forward_ns=forward,
        crossing=up(crossing),
        forward_peak=up(peaks),
        gradients=up(gradients),
        start=np.cumsum([0, *options], dtype=np.int64),
        saved=up(flat.saved_bytes),
        option_forward_peak=up(flat.forward_peak_bytes),
        option_backward_peak=up(flat.backward_peak_bytes),
        rerun_ns=flat.rerun_ns if trim else np.repeat(forward, options),
        extra_ns=flat.extra_ns,
    )
