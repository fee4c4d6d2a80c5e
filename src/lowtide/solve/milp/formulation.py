"""What Checkmate's programs are made from: stages, units, and how solutions are read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from lowtide.solve.milp.linear import INFINITY, Floats, LinearProgram, ProgramBuilder
from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.model.reach import Reach

ZERO, ONE = -1, -2  # in place of a column: the constant
_LARGEST = 1e6  # numbers in the program, roughly


@dataclass(frozen=True, slots=True)
class Scale:
    """Bytes are multiplied by ``bytes``; ``room`` is the budget so scaled, with half a byte unit to spare, which no
    sum of sizes can use. ``unit``: that of the objective, ``whole`` where it is the greatest common divisor."""

    bytes: float
    room: float
    unit: float
    whole: bool


def make_scale(model: CompactGraph, budget_bytes: int | None) -> Scale:
    """Sizes and times are divided by their greatest common divisors, or further where numbers stay too large."""
    sizes = np.concatenate([model.storage_bytes, model.workspace_bytes, [model.rng_state_bytes]])
    times = np.concatenate([model.time_ns, model.view_time_ns])
    size, time = max(int(np.gcd.reduce(sizes)), 1), max(int(np.gcd.reduce(times)), 1)
    room = int(model.storage_bytes.sum()) if budget_bytes is None else max(budget_bytes - model.fixed_bytes, 0)
    byte_unit = max(float(size), room / _LARGEST)
    spare = (room // size + 0.5) * size / byte_unit
    if budget_bytes is None:
        return Scale(1.0 / byte_unit, spare, byte_unit, byte_unit == size)
    time_unit = max(float(time), float(times.sum()) / _LARGEST)
    return Scale(1.0 / byte_unit, spare, time_unit, time_unit == time)


@dataclass(frozen=True, slots=True)
class FrontierStage:
    """``target`` runs for the first time at its end; what may be recomputed before that has a column."""

    target: int
    recompute: dict[int, int]  # node -> column, ascending


@dataclass(slots=True, eq=False)
class Formulation:
    """A program in stages and how to read its solutions. ``budget_bytes`` ``None``: the peak is minimised, in units of
    the scale, and ``peak`` is its column; otherwise the recompute time. ``stored[t]`` and ``saved[t]``: the columns S and
    G (or ZERO, ONE) of stage ``t`` by storage and by random node."""

    model: CompactGraph
    budget_bytes: int | None
    ordered: bool = field(default=True, kw_only=True)
    rows: ProgramBuilder = field(default_factory=ProgramBuilder, kw_only=True)
    reach: Reach = field(init=False)
    scale: Scale = field(init=False)
    stages: list[FrontierStage] = field(init=False)
    stored: list[dict[int, int]] = field(init=False)
    saved: list[dict[int, int]] = field(init=False)
    peak: int = field(init=False)
    program: LinearProgram = field(init=False)

    def lasts(self, stage: FrontierStage, storage: int) -> bool:
        """Whether the storage, once computed, is there throughout the stage."""
        return bool(self.model.held[storage] or (self.model.handed[storage] and stage.target > self.model.boundary))

    @property
    def absolute_gap(self) -> float:
        """The objective takes whole numbers only where its unit is the greatest common divisor."""
        return 0.99 if self.scale.whole else 1e-6

    def lower_bound(self, bound: float) -> int:
        """Nanoseconds (bytes where the peak is minimised) that follow from a bound on the objective."""
        if bound == -INFINITY:
            return 0
        safe = max(bound - 1e-2 - 1e-7 * abs(bound), 0.0)  # the solver's tolerances
        if self.scale.whole:
            safe = math.ceil(safe)
        base = self.model.fixed_bytes if self.budget_bytes is None else self.model.least_ns
        return base + int(safe * self.scale.unit)

    def sequence(self, values: Floats) -> list[int]:
        """Nodes in the order in which they are computed."""
        nodes: list[int] = []
        for stage in self.stages:
            nodes.extend(node for node, column in stage.recompute.items() if values[column] > 0.5)
            nodes.append(stage.target)
        return nodes[:-1]
