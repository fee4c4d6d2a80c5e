"""Checkmate's mixed-integer program on the compact model, in stages that advance the frontier.

Jain et al., MLSys 2020, arXiv 1910.02653, section 4, with these variables per stage t, which ends with the first compute of
its node (the last stage with the end of the program):

    R[t, i]     node i < t is recomputed in stage t                                  (their R; eq. 1 and 8)
    S[t, s]     storage s lives when stage t begins                                  (their S; eq. 1 and 8)
    A[t, u, s]  storage s lives while the users of s up to u run in stage t          (in place of FREE and U)
    G[t, i]     the generator state of random node i is kept when stage t begins
    F[t, v]     view v is formed when stage t begins;  X[t, v]: it is formed in stage t

    minimise    sum time_i R[t, i] + sum time_v X[t, v]
    R[t, k] <= S[t, s] + R[t, base(s)]           for what k reads          S[t+1, s] <= S[t, s] + R[t, base(s)]
    A[t, u, s] >= R[t, u], A[t, u', s] for the next user u', and S[t+1, s] after the last
    sum bytes_s alive(t, k, s) + (bytes of k's own storages + workspace of k) R[t, k] <= budget       at every k of t

A stage runs its recomputes in program order, each at most once. Variables exist where they can matter: a recompute of i in
stage t only where a path of reads through recomputable nodes leads from i to a node at or after t. In the reduced form
stages of the forward pass recompute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from lowtide.solve.milp.formulation import ONE, ZERO, Formulation, make_scale
from lowtide.solve.model.reach import reach


@dataclass(slots=True, eq=False)
class StageModel(Formulation):
    """Builds a formulation. ``budget_bytes`` ``None``: minimise the peak."""

    reduced: bool = False
    every: int = 1  # recomputation in every so many stages only
    integer: bool = True

    def build(self) -> Self:
        model = self.model
        self.reach = reach(model)
        self.scale = make_scale(model, self.budget_bytes)
        self.peak = self.rows.add_column(cost=1.0) if self.budget_bytes is None else ZERO
        self.recompute = [self._recomputed(target) for target in range(model.nodes + 1)]
        self.stored = self._stored()
        self.saved = self._saved()
        for stage in range(model.nodes + 1):
            self._inputs(stage)
            self._kept(stage)
            (self.ordered_memory if self.ordered else self.any_order_memory)(stage)
        self._views()
        self.program = self.rows.build()
        return self

    def _recomputed(self, target: int) -> dict[int, int]:
        allowed = range(target) if self._recomputes(target) else ()
        nodes = (node for node in allowed if self.reach.node_until[node] >= target)
        return {node: self.rows.add_column(self._cost(node), 0.0, 1.0, self.integer) for node in nodes}

    def _recomputes(self, target: int) -> bool:
        """Whether anything is recomputed in the stages of the node."""
        return not ((target - self.model.boundary) % self.every or (self.reduced and target < self.model.boundary))

    def _cost(self, node: int) -> float:
        """What a recompute adds to the objective."""
        return 0.0 if self.budget_bytes is None else float(self.model.time_ns[node]) / self.scale.unit

    def _form(self, stage: int, time: float) -> int:
        """A column X: whether a view that takes so long, in units of the objective, is formed in the stage."""
        return self.rows.add_column(time, 0.0, 1.0)

    def _fixed_until(self, storage: int) -> int:
        """The last stage at whose beginning the storage must be there: nothing could rebuild it before that."""
        model, base = self.model, self.reach.base[storage]
        firsts = self.reach.readers[storage]
        if model.held[storage]:
            return model.nodes
        if not model.recomputable[base]:
            return max(firsts, default=-1)
        if self.reduced:
            return max((reader for reader in firsts if reader < model.boundary), default=-1)
        return -1

    def _stored(self) -> list[dict[int, int]]:
        """One column per storage and stretch of stages in which it is neither used nor made."""
        fixed = [self._fixed_until(storage) for storage in range(len(self.reach.base))]
        stored: list[dict[int, int]] = [{}]
        for following in range(1, self.model.nodes + 1):
            stage, table = following - 1, dict[int, int]()
            for storage, until in enumerate(self.reach.storage_until):
                base = self.reach.base[storage]
                if base >= following or until < following:
                    continue
                known = stored[stage].get(storage, ZERO)
                if following <= fixed[storage] or self.lasts(following, storage):
                    table[storage] = ONE
                elif known >= 0 and base not in self.recompute[stage] and not self.users(stage, storage):
                    table[storage] = known
                else:
                    table[storage] = self.rows.add_column(0.0, 0.0, 1.0, self.integer)
            stored.append(table)
        return [*stored, {}]

    def _saved(self) -> list[dict[int, int]]:
        """Per stage the columns of the generator states kept at its beginning."""
        model, saved = self.model, [dict[int, int]()]
        nodes = [int(node) for node in np.flatnonzero(model.random) if self.reach.node_until[node] >= 0]
        for following in range(1, self.model.nodes + 1):
            stage, table = following - 1, dict[int, int]()
            for node in nodes if model.rng_state_bytes else []:
                if node >= following or self.reach.node_until[node] < following:
                    continue
                known = saved[stage].get(node, ZERO)
                unchanged = known >= 0 and node not in self.recompute[stage]
                table[node] = known if unchanged else self.rows.add_column(0.0, 0.0, 1.0)
                if known >= 0 and not unchanged:
                    self.at_most(table[node], [known])
            saved.append(table)
        return [*saved, {}]

    def _inputs(self, stage: int) -> None:
        """Whoever runs finds what it reads, and a recompute of a random node its generator state."""
        for node, column in (*self.recompute[stage].items(), (stage, ONE)):
            for storage in self.reach.reads[node]:
                self.at_most(column, self._sources(stage, storage))
            if column >= 0 and self.model.random[node] and self.model.rng_state_bytes:
                self.at_most(column, [self.saved[stage].get(node, ZERO)])

    def _sources(self, stage: int, storage: int) -> list[int]:
        return [
            self.stored[stage].get(storage, ZERO),
            self.recompute[stage].get(self.reach.base[storage], ZERO),
        ]

    def _kept(self, stage: int) -> None:
        """What lives when the next stage begins lived when this one began or was computed in it."""
        for storage, column in self.stored[stage + 1].items():
            if self.reach.base[storage] != stage and column != self.stored[stage].get(storage):
                self.at_most(column, self._sources(stage, storage))

    def _views(self) -> None:
        """F and X of each view that takes time: formed once per life of its storage in which it is needed."""
        needed_by: list[list[int]] = [[] for _ in self.model.view_time_ns]
        for node, views in enumerate(self.reach.needs):
            for view in views:
                needed_by[view].append(node)
        storage_of = np.repeat(np.arange(len(self.reach.base)), np.diff(self.model.views_start))
        for view, storage in zip(self.model.views.tolist(), storage_of.tolist(), strict=True):
            time = float(self.model.view_time_ns[view])
            if time and self.budget_bytes is not None:
                self._view(storage, needed_by[view], time / self.scale.unit)

    def _view(self, storage: int, needed_by: list[int], time: float) -> None:
        formed = ZERO
        for stage, recompute in enumerate(self.recompute):
            runs = [recompute[u] for u in needed_by if u in recompute]
            runs += [ONE] * (stage in needed_by)
            new = self._form(stage, time) if runs else ZERO
            for column in runs:
                self.at_most(column, [new, formed])
            before, after = self.stored[stage].get(storage, ZERO), self.stored[stage + 1].get(storage, ZERO)
            if after == ZERO:
                formed = ZERO
            elif new != ZERO or (formed != ZERO and after != before):
                carried = self.rows.add_column(0.0, 0.0, 1.0)
                self.at_most(carried, [new, formed])
                self.at_most(carried, [after])
                formed = carried
