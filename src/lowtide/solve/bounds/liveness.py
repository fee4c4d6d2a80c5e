"""What is resident for certain: storages that no schedule within the budget can have dropped at some point.

An *instant* t is the first compute of node t; *slot* t is what runs between the instants t - 1 and t (recomputes only).
A recompute of node i in slot t needs, at once, the node's workspace, its own storages, what it reads and everything
that is certainly live throughout the slot; where that is above the budget, slot t is closed to node i. A storage that
instant r reads was then live since the last slot open to its node, which raises what is certain elsewhere: repeated
until nothing changes. If an instant's certain bytes are above the budget, no schedule fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lowtide.native import core
from lowtide.solve.model.compact import CompactGraph, Flags, Numbers

Bytes = npt.NDArray[np.uint8]

_ROUNDS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """``open_slots[i, t]``: node i may be recomputed in slot t. ``instant_bytes[t]``: bytes certainly resident while
    node t is first computed, without ``fixed_bytes``. ``feasible`` is false where that proves that nothing fits."""

    model: CompactGraph
    room_bytes: int  # the budget without ``fixed_bytes``
    last_need: Numbers  # storage -> the last instant that reads it or reads what could be rebuilt from it
    open_slots: Bytes  # node x slot
    certain_slots: Bytes  # storage x slot: live throughout the slot
    instant_bytes: Numbers
    feasible: bool
    kept_ns: Numbers | None = None  # storage -> what it costs that it is live at a cut

    def certain_at(self, instant: int) -> Flags:
        """Storages computed before ``instant`` that are certainly live then."""
        model, after = self.model, self.certain_slots[:, instant + 1] == 1
        after[model.reads_of(instant)] = True
        return np.asarray((after | model.held) & (model.storage_node < instant), np.bool_)


def _last_needs(model: CompactGraph) -> Numbers:
    need = model.storage_node.astype(np.int64)
    for node in range(model.nodes, -1, -1):
        own = model.owns_of(node)
        latest = node
        if node < model.nodes and model.recomputable[node] and len(own):
            latest = max(node, int(need[own].max()))
        reads = model.reads_of(node)
        need[reads] = np.maximum(need[reads], latest)
    return need


def liveness(model: CompactGraph, budget_bytes: int) -> Liveness:
    """The closure described in the module's docstring."""
    until, last_need = np.zeros(model.nodes + 1, np.int64), _last_needs(model)
    wanted = np.where(model.handed, np.minimum(last_need, model.boundary), last_need)
    np.maximum.at(until, model.storage_node, np.where(model.held, -1, wanted))
    room = budget_bytes - model.fixed_bytes
    open_slots, certain, instant_bytes = core.close_slots(model, room, until, _ROUNDS)
    _add_handed(model, certain, instant_bytes)
    feasible = bool((instant_bytes <= room).all())
    return Liveness(model, room, last_need, open_slots, certain, instant_bytes, feasible)


def _add_handed(model: CompactGraph, certain: Bytes, instant_bytes: Numbers) -> None:
    """What was handed over is live from the boundary on, also where its node may run again for another of its results."""
    for storage in np.flatnonzero(model.handed & ~model.held):
        slots = np.arange(max(model.boundary, int(model.storage_node[storage])) + 1, model.nodes + 2)
        missing = slots[certain[storage, slots] == 0] - 1  # instants
        counted = [instant for instant in missing if storage in model.reads_of(int(instant))]
        certain[storage, slots] = 1
        instant_bytes[np.setdiff1d(missing, counted)] += model.storage_bytes[storage]
