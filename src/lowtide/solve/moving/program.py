"""Checkmate's program with transfers: what to keep, compute again, move away and fetch, on the clock of ``ir.transfers``.

The program of any order (``lowtide.solve.milp.stages``) on a split graph (``lowtide.solve.model.split``), in which an operator
may run again apart from the fetches of its results. Glossary: operator ``p`` makes storage ``s``; node ``f`` makes ``s`` of
its handle: run first right after ``p``, for nothing; run again as the result of a recompute of ``p`` in the same stage, or
else as a transfer back. ``time_t``, ``there_s`` and ``back_s`` are the times of the first node of stage t and of the transfers
of s. Beside R and S, per stage t:

    T[t]       when the stage ends, which is with the first compute of its node
    C[t, s]    s was offloaded before the stage begins               K[t, s]  and its copy is wanted still
    F[t, s]    s is fetched in the stage                             A[t, s]  when it is back then
    Q[t], B[t] how long the lanes there and back have yet to work when the stage ends      E[s]  when the copy of s is complete

    minimise   Z >= T[n] + Q[n], T[n] + B[n]
    T[t] >= T[t-1] + sum time_i R[t, i] + time of views formed in the stage + time_t
    Q[t] >= Q[t-1] + sum there_s (C[t+1, s] - C[t, s]) - (T[t] - T[t-1])      B alike with F; one of both where lanes are shared
    F[t, s] >= R[t, f] - R[t, p];   F[t, s] <= C[t+1, s];   0 <= C[t+1, s] - C[t, s] <= S[t, s] + R[t, f]
    E[s] >= T[t-1] + Q[t-1] + there_s            if C[t+1, s] - C[t, s] = 1
    A[t, s] >= T[t-1] + B[t-1] + back_s, E[s] + back_s                        if F[t, s] = 1
    T[t] - time_t >= E[s], A[t, s]               if s was offloaded, or fetched in t, and S[t+1, s] = 0: its free waits for both
    T[u] - time_u >= A[t, s]                     for the first u >= t whose node reads s
    T[t] - time_t - time_i >= A[t, s]            if R[t, i] = 1 for an i that reads s, S[t, s] = 0 and R[t, p] = 0
    K[t+1, s], F[t, s] <= K[t, s] + C[t+1, s] - C[t, s];   sum bytes_s K[t, s] <= capacity of the second memory

"If" is a big number times the columns named. What is left out: the order of things within a stage and waiting there other than
above, and recomputes of an operator beyond one in a stage. So every valid schedule is a solution of no more time: the program's
bound holds for all schedules with transfers, and where it has no solution, nothing fits. The exact clock is no linear program;
the solution is translated to a schedule, whose transfers are placed (``lowtide.solve.moving.steps``) and which the simulator
judges in exact nanoseconds. What is as quick as the bound is an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from lowtide.ir import SecondMemory
from lowtide.solve.milp.formulation import ONE, ZERO, Terms, summed
from lowtide.solve.milp.stages import StageModel
from lowtide.solve.model.split import Split

_UNITS = 1e4  # of the program's time, at most: small enough numbers for small tolerances
_WHOLE = 1e-6  # how far from whole a column may be


@dataclass(frozen=True, slots=True)
class _Move:
    """A storage that may move: its number in the model, the node that makes its handle, units of its transfers, bytes."""

    storage: int
    maker: int
    there: float
    back: float
    bytes: int


@dataclass(slots=True, eq=False)
class MovingModel(StageModel):
    """Builds the formulation on ``model``, that of the split graph of ``parts``. ``known_ns``: the time of a schedule within
    the budget, where there is one."""

    parts: Split = field(kw_only=True)
    memory: SecondMemory = field(kw_only=True)
    known_ns: int | None = field(default=None, kw_only=True)
    moves: dict[int, _Move] = field(init=False)  # by the node of the fetch
    unit: float = field(init=False)
    exact_unit: bool = field(init=False)
    most: float = field(init=False)  # no time of a schedule that matters is above
    ends: list[int] = field(init=False)  # T
    fetched: list[dict[int, int]] = field(init=False)  # F by stage and node of the fetch
    awaited: list[tuple[int, int]] = field(init=False)  # a stage whose node reads what column A says the arrival of
    formed: dict[int, list[tuple[int, float]]] = field(init=False)  # views by stage: column, units

    def build(self) -> Self:
        self.formed = {}
        self._units()
        StageModel.build(self)
        self._clock()
        self.program = self.rows.build()
        return self

    def _units(self) -> None:
        model, memory = self.model, self.memory
        nodes = {int(op): node for node, op in enumerate(model.op_of_node)}
        sizes = {
            nodes[op]: int(self.parts.costs.storage_bytes[s]) for op, s in self.parts.fetched.items() if op in nodes
        }
        times = [*model.time_ns.tolist(), *model.view_time_ns.tolist()]
        transfers = [each for size in sizes.values() for each in (memory.offload_ns(size), memory.fetch_ns(size))]
        divisor = max(math.gcd(*times, *transfers), 1)
        self.unit = max(float(divisor), sum(times) / _UNITS)
        self.exact_unit = self.unit == divisor
        self.moves = {
            node: _Move(
                storage=int(model.owns_of(node)[0]),
                maker=int(model.storage_node[model.reads_of(node)[0]]),
                there=memory.offload_ns(size) / self.unit,
                back=memory.fetch_ns(size) / self.unit,
                bytes=size,
            )
            for node, size in sizes.items()
        }
        # Without a schedule: one of each in every stage, one after the other.
        self.most = (model.nodes + 1) * (sum(times) + sum(transfers)) / self.unit
        if self.known_ns is not None:
            self.most = self.known_ns / self.unit + 0.5

    @property
    def absolute_gap(self) -> float:
        return 1e-3

    def lower_bound(self, bound: float) -> int:
        """Nanoseconds that follow from a bound on the objective."""
        safe = max(bound - 1e-2 - _WHOLE * self.most * len(self.recompute), 0.0)  # the solver's tolerances
        return int((math.ceil(safe) if self.exact_unit else safe) * self.unit)

    def _cost(self, node: int) -> float:
        return 0.0

    def _recomputes(self, target: int) -> bool:
        return target not in self.moves  # a result is there at once when its operator has run

    def _form(self, stage: int, time: float) -> int:
        column = self.rows.add_column(0.0, 0.0, 1.0)
        self.formed.setdefault(stage, []).append((column, time * self.scale.unit / self.unit))
        return column

    def _at_least(self, terms: Terms, least: float) -> None:
        """A sum is at least so much; the constants ZERO and ONE are understood."""
        total = summed(terms)
        constant = total.pop(ONE, 0.0)
        self.rows.add_row(list(total), list(total.values()), least - constant)

    def _time(self) -> int:
        return self.rows.add_column(0.0, 0.0, self.most)

    def _clock(self) -> None:
        copies = {node: self._copies(node) for node in self.moves}
        complete = {node: self._time() for node in self.moves}
        self.ends, self.fetched, self.awaited = [], [], []
        end = leaving = coming = ZERO
        for stage in range(len(self.recompute)):
            self.fetched.append({} if stage in self.moves else self._fetches(stage))
            if stage in self.moves:
                self.ends.append(end)
                continue
            before = (end, leaving, coming)
            end, leaving = self._time(), self._time()
            coming = leaving if self.memory.shared else self._time()
            self.ends.append(end)
            self._at_least([(end, 1.0), (before[0], -1.0), *self._spent(stage)], self._units_of(stage))
            there, back = [(leaving, 1.0), (before[1], -1.0)], [(coming, 1.0), (before[2], -1.0)]
            for node, move in self.moves.items():
                asked = [(copies[node][stage + 1], 1.0), (copies[node][stage], -1.0)]
                there += [(column, -move.there * value) for column, value in asked]
                self._offload(stage, node, asked, complete[node], before)
            for node, column in self.fetched[stage].items():
                back.append((column, -self.moves[node].back))
                self._fetch(stage, node, column, copies[node], complete[node], before)
            passed = [(end, 1.0), (before[0], -1.0)]
            lanes = [there + back[2:]] if self.memory.shared else [there, back]
            for lane in lanes:
                self._at_least(lane + passed, 0.0)
        for reader, arrival in self.awaited:
            self._at_least([(self.ends[reader], 1.0), (arrival, -1.0)], self._units_of(reader))
        self._finish(end, (leaving, coming))
        self._second_memory(copies)

    def _finish(self, end: int, late: Sequence[int]) -> None:
        finish = self.rows.add_column(1.0, 0.0, self.most)
        for column in late:
            self._at_least([(finish, 1.0), (end, -1.0), (column, -1.0)], 0.0)

    def _units_of(self, node: int) -> float:
        return float(self.model.time_ns[node]) / self.unit

    def _spent(self, stage: int) -> list[tuple[int, float]]:
        """What recomputes and views of the stage take, to be subtracted."""
        runs = [(column, self._units_of(node)) for node, column in self.recompute[stage].items()]
        return [(column, -time) for column, time in (*runs, *self.formed.get(stage, ())) if time]

    def _copies(self, node: int) -> list[int]:
        """C by stage, and behind the last."""
        move, last = self.moves[node], self.reach.storage_until[self.moves[node].storage]
        columns = [ZERO] * (len(self.recompute) + 1)
        for stage in range(node + 1, len(self.recompute)):
            same = stage > last or stage in self.moves
            columns[stage + 1] = columns[stage] if same else self.rows.add_column(0.0, 0.0, 1.0, self.integer)
            if not same:
                before, after = columns[stage], columns[stage + 1]
                made = self.recompute[stage].get(node, ZERO)
                live = self.stored[stage].get(move.storage, ZERO)
                self._at_least([(after, 1.0), (before, -1.0)], 0.0)
                self._at_least([(after, -1.0), (before, 1.0), (live, 1.0), (made, 1.0)], 0.0)
        return columns

    def _fetches(self, stage: int) -> dict[int, int]:
        """F of the stage: what is made again and not computed."""
        recompute, found = self.recompute[stage], dict[int, int]()
        for node, move in self.moves.items():
            if node in recompute:
                found[node] = recompute[node]
                if move.maker in recompute:
                    found[node] = self.rows.add_column(0.0, 0.0, 1.0)
                    self._at_least([(found[node], 1.0), (recompute[node], -1.0), (recompute[move.maker], 1.0)], 0.0)
        return found

    def _offload(self, stage: int, node: int, asked: Terms, complete: int, before: tuple[int, int, int]) -> None:
        """When the copy of a storage is complete that is asked for in the stage, and that its free waits for it."""
        move, most = self.moves[node], self.most
        if stage <= node or self.reach.storage_until[move.storage] < stage:
            return
        big = [(column, -value * (most + move.there)) for column, value in asked]
        self._at_least([(complete, 1.0), (before[0], -1.0), (before[1], -1.0), *big], -most)
        live = self.stored[stage + 1].get(move.storage, ZERO)
        if live != ONE and self.reach.storage_until[move.storage] > stage:
            gone = [(asked[0][0], -most), (live, most)]
            self._at_least([(self.ends[stage], 1.0), (complete, -1.0), *gone], self._units_of(stage) - most)

    def _fetch(
        self, stage: int, node: int, fetched: int, copies: Sequence[int], complete: int, before: tuple[int, int, int]
    ) -> None:
        """When a storage is back that is fetched in the stage, and who waits for it."""
        move, most = self.moves[node], self.most
        self.at_most(fetched, [copies[stage + 1]])
        back, big = self._time(), -(most + move.back)
        self._at_least([(back, 1.0), (before[0], -1.0), (before[2], -1.0), (fetched, big)], -most)
        self._at_least([(back, 1.0), (complete, -1.0), (fetched, big)], -most)
        target = self._units_of(stage)
        ended = [(self.ends[stage], 1.0), (back, -1.0)]
        reads = self.reach.readers[move.storage]
        live = self.stored[stage + 1].get(move.storage, ZERO)
        if stage in reads:
            self._at_least(ended, target)
        else:
            self.awaited += [(reader, back) for reader in reads if reader > stage][:1]
            self._at_least([*ended, (live, most)], target)
        there = self.stored[stage].get(move.storage, ZERO)
        recompute = self.recompute[stage]
        for reader in self.users(stage, move.storage) if there != ONE else ():
            if reader != stage:
                runs = [(recompute[reader], -most), (there, most), (recompute.get(move.maker, ZERO), most)]
                self._at_least([*ended, *runs], target + self._units_of(reader) - most)

    def _second_memory(self, copies: dict[int, list[int]]) -> None:
        """K, and what the second memory holds when a stage begins."""
        if self.memory.capacity_bytes is None:
            return
        held: list[list[tuple[int, float]]] = [[] for _ in range(len(self.recompute) + 1)]
        for node, move in self.moves.items():
            kept = ZERO
            for stage in range(node + 1, self.reach.storage_until[move.storage] + 1):
                if stage in self.moves:
                    continue
                asked = [(copies[node][stage + 1], 1.0), (copies[node][stage], -1.0)]
                following = self.rows.add_column(0.0, 0.0, 1.0)
                for column in (following, self.fetched[stage].get(node, ZERO)):
                    self._at_least([(column, -1.0), (kept, 1.0), *asked], 0.0)
                held[stage + 1].append((following, -move.bytes / max(self.memory.capacity_bytes, 1)))
                kept = following
        for terms in filter(None, held):
            self._at_least(terms, -1.0)
