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

from lowtide.solve.model.compact import CompactGraph, Flags, Numbers
from lowtide.solve.model.compiled import kernel

Bytes = npt.NDArray[np.uint8]

_ROUNDS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Liveness:
    """``open_slots[i, t]``: node i may be recomputed in slot t. ``instant_bytes[t]``: bytes certainly resident while
    node t is first computed, without ``fixed_bytes``. ``feasible`` is false where that proves that nothing fits."""

    open_slots: Bytes  # node x slot
    certain_slots: Bytes  # storage x slot: live throughout the slot
    instant_bytes: Numbers
    feasible: bool

    def certain_at(self, model: CompactGraph, instant: int) -> Flags:
        """Storages computed before ``instant`` that are certainly live then."""
        after = self.certain_slots[:, instant + 1] == 1
        after[model.reads_of(instant)] = True
        return np.asarray((after | model.held) & (model.storage_node < instant), np.bool_)


def last_needs(model: CompactGraph) -> Numbers:
    """Per storage, the last instant that reads it or reads what could be rebuilt from it."""
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
    until = np.zeros(model.nodes + 1, np.int64)
    np.maximum.at(until, model.storage_node, np.where(model.held, -1, last_needs(model)))
    open_slots = np.zeros((model.nodes, model.nodes + 2), np.uint8)
    for node in np.flatnonzero(model.recomputable):
        open_slots[node, node + 1 : until[node] + 1] = 1
    certain = np.zeros((len(model.storage_node), model.nodes + 2), np.uint8)
    room = budget_bytes - model.fixed_bytes
    for _ in range(_ROUNDS):
        if not _close_slots(model, room, until, open_slots, certain):
            break
    instant_bytes = _instant_bytes(model, certain)
    return Liveness(open_slots, certain, instant_bytes, bool((instant_bytes <= room).all()))


@kernel
def _close_slots(t: CompactGraph, room: int, until: Numbers, open_slots: Bytes, certain: Bytes) -> bool:
    """One round: mark what is certain, close the slots in which a recompute does not fit; whether any was closed."""
    _mark_certain(t, open_slots, certain)
    slot_bytes = np.zeros(t.nodes + 2, np.int64)
    for storage in range(len(t.storage_node)):
        for slot in range(t.storage_node[storage] + 1, t.nodes + 1):
            if certain[storage, slot] == 1:
                slot_bytes[slot] += t.storage_bytes[storage]
    closed = False
    for node in range(t.nodes):
        own = t.workspace_bytes[node]
        for i in range(t.owns_start[node], t.owns_start[node + 1]):
            own += t.storage_bytes[t.owns[i]]
        for slot in range(node + 1, until[node] + 1):
            if open_slots[node, slot] == 0:
                continue
            step = own + slot_bytes[slot]
            for i in range(t.reads_start[node], t.reads_start[node + 1]):
                if certain[t.reads[i], slot] == 0:
                    step += t.storage_bytes[t.reads[i]]
            if step > room:
                open_slots[node, slot] = 0
                closed = True
    return closed


@kernel
def _mark_certain(t: CompactGraph, open_slots: Bytes, certain: Bytes) -> None:
    """A storage is live from the last slot open to its node until the instant that reads it."""
    for storage in range(len(t.storage_node)):
        if t.held[storage]:
            certain[storage, t.storage_node[storage] + 1 : t.nodes + 1] = 1
    for instant in range(t.nodes + 1):
        for i in range(t.reads_start[instant], t.reads_start[instant + 1]):
            storage = t.reads[i]
            slot = instant
            base = t.storage_node[storage]
            while slot > base and open_slots[base, slot] == 0:
                certain[storage, slot] = 1
                slot -= 1


@kernel
def _instant_bytes(t: CompactGraph, certain: Bytes) -> Numbers:
    """Bytes certainly resident at each instant."""
    instant_bytes = t.workspace_bytes.copy()
    for node in range(t.nodes + 1):
        for i in range(t.owns_start[node], t.owns_start[node + 1]):
            instant_bytes[node] += t.storage_bytes[t.owns[i]]
        for i in range(t.reads_start[node], t.reads_start[node + 1]):
            if certain[t.reads[i], node + 1] == 0 and not t.held[t.reads[i]]:
                instant_bytes[node] += t.storage_bytes[t.reads[i]]
        for storage in range(len(t.storage_node)):
            if t.storage_node[storage] < node and (certain[storage, node + 1] == 1 or t.held[storage]):
                instant_bytes[node] += t.storage_bytes[storage]
    return instant_bytes
