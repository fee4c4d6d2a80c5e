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

from lowtide.solve.milp.formulation import ONE, ZERO, FrontierStage, make_scale
from lowtide.solve.milp.memory import StageMemory
from lowtide.solve.model.reach import reach


@dataclass(slots=True, eq=False)
class StageModel(StageMemory):
    """Builds a formulation. ``budget_bytes`` ``None``: minimise the peak."""

    reduced: bool = False
    every: int = 1  # recomputation in every so many stages only
    integer: bool = True

    def build(self) -> Self:
        model = self.model
        self.reach = reach(model)
        self.scale = make_scale(model, self.budget_bytes)
        self.peak = self.rows.add_column(cost=1.0) if self.budget_bytes is None else ZERO
        self.stages = self._stages()
        self.stored = self._stored()
        self.saved = self._saved()
        for index in range(len(self.stages)):
            self._inputs(index)
            self._kept(index)
            (self.ordered_memory if self.ordered else self.any_order_memory)(index)
        self._views()
        self.program = self.rows.build()
        return self

    def _stages(self) -> list[FrontierStage]:
        model, until = self.model, self.reach.node_until
        stages = []
        for target in range(model.nodes + 1):
            allowed = range(target) if self._recomputes(target) else []
            nodes = [node for node in allowed if until[node] >= target]
            table = {node: self.rows.add_column(self._cost(node), 0.0, 1.0, self.integer) for node in nodes}
            stages.append(FrontierStage(target, table))
        return stages

    def _recomputes(self, target: int) -> bool:
        """Whether anything is recomputed in the stages of the node."""
        return not ((target - self.model.boundary) % self.every or (self.reduced and target < self.model.boundary))

    def _cost(self, node: int) -> float:
        """What a recompute adds to the objective."""
        return 0.0 if self.budget_bytes is None else float(self.model.time_ns[node]) / self.scale.unit

    def _form(self, index: int, time: float) -> int:
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
        for index, stage in enumerate(self.stages[:-1]):
            following, table = self.stages[index + 1], {}
            for storage, until in enumerate(self.reach.storage_until):
                base = self.reach.base[storage]
                if base >= following.target or until < following.target:
                    continue
                known = stored[index].get(storage, ZERO)
                if following.target <= fixed[storage] or self.lasts(following, storage):
                    table[storage] = ONE
                elif known >= 0 and base not in stage.recompute and not self.users(stage, storage):
                    table[storage] = known
                else:
                    table[storage] = self.rows.add_column(0.0, 0.0, 1.0, self.integer)
            stored.append(table)
        return [*stored, {}]

    def _saved(self) -> list[dict[int, int]]:
        """Per stage the columns of the generator states kept at its beginning."""
        model, saved = self.model, [dict[int, int]()]
        nodes = [int(node) for node in np.flatnonzero(model.random) if self.reach.node_until[node] >= 0]
        for index, stage in enumerate(self.stages[:-1]):
            following, table = self.stages[index + 1], {}
            for node in nodes if model.rng_state_bytes else []:
                if node >= following.target or self.reach.node_until[node] < following.target:
                    continue
                known = saved[index].get(node, ZERO)
                unchanged = known >= 0 and node not in stage.recompute
                table[node] = known if unchanged else self.rows.add_column(0.0, 0.0, 1.0)
                if known >= 0 and not unchanged:
                    self.at_most(table[node], [known])
            saved.append(table)
        return [*saved, {}]

    def _inputs(self, index: int) -> None:
        """Whoever runs finds what it reads, and a recompute of a random node its generator state."""
        stage = self.stages[index]
        for node, column in (*stage.recompute.items(), (stage.target, ONE)):
            for storage in self.reach.reads[node]:
                self.at_most(column, self._sources(index, storage))
            if column >= 0 and self.model.random[node] and self.model.rng_state_bytes:
                self.at_most(column, [self.saved[index].get(node, ZERO)])

    def _sources(self, index: int, storage: int) -> list[int]:
        return [
            self.stored[index].get(storage, ZERO),
            self.stages[index].recompute.get(self.reach.base[storage], ZERO),
        ]

    def _kept(self, index: int) -> None:
        """What lives when the next stage begins lived when this one began or was computed in it."""
        for storage, column in self.stored[index + 1].items():
            if self.reach.base[storage] != self.stages[index].target and column != self.stored[index].get(storage):
                self.at_most(column, self._sources(index, storage))

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
        for index, stage in enumerate(self.stages):
            runs = [stage.recompute[u] for u in needed_by if u in stage.recompute]
            runs += [ONE] * (stage.target in needed_by)
            new = self._form(index, time) if runs else ZERO
            for column in runs:
                self.at_most(column, [new, formed])
            before, after = self.stored[index].get(storage, ZERO), self.stored[index + 1].get(storage, ZERO)
            if after == ZERO:
                formed = ZERO
            elif new != ZERO or (formed != ZERO and after != before):
                carried = self.rows.add_column(0.0, 0.0, 1.0)
                self.at_most(carried, [new, formed])
                self.at_most(carried, [after])
                formed = carried
