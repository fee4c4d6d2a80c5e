"""The columns of a staged program that its rows are written about."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.solve.milp.program import Rows
from lowtide.solve.milp.tables import ONE, ZERO, Reach, Scale, Stage
from lowtide.solve.model.compact import CompactGraph


@dataclass(slots=True, eq=False)
class StageColumns:
    """``stored[t]`` and ``saved[t]``: the columns S and G of stage ``t`` by storage and by random node.

    ``budget_bytes`` ``None``: the peak is minimised, and ``peak`` is its column.
    """

    model: CompactGraph
    budget_bytes: int | None
    rows: Rows = field(default_factory=Rows, kw_only=True)
    reach: Reach = field(init=False)
    scale: Scale = field(init=False)
    stages: list[Stage] = field(init=False)
    stored: list[dict[int, int]] = field(init=False)
    saved: list[dict[int, int]] = field(init=False)
    peak: int = field(init=False)

    def users(self, stage: Stage, storage: int) -> list[int]:
        """Those who may read it in the stage, ascending."""
        return [u for u in self.reach.readers[storage] if u in stage.recompute or u == stage.target]

    def at_most(self, column: int, others: list[int]) -> None:
        """``column <= sum of others``, constants understood."""
        if column == ZERO or ONE in others:
            return
        index = [other for other in others if other >= 0]
        values = [-1.0] * len(index)
        if column == ONE:
            self.rows.add_row(index, values, upper=-1.0)
        elif column not in index:
            self.rows.add_row([column, *index], [1.0, *values], upper=0.0)
