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

from lowtide.solve.model.compact import CompactGraph, Flags, Indices, Numbers
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
    storages, nodes = len(model.storage_node), model.nodes
    need = last_needs(model)
    until = np.zeros(nodes + 1, np.int64)
    np.maximum.at(until, model.storage_node, np.where(model.held, -1, need))
    open_slots = np.zeros((nodes, nodes + 2), np.uint8)
    certain = np.zeros((storages, nodes + 2), np.uint8)
    instant_bytes = np.zeros(nodes + 1, np.int64)
    room = budget_bytes - model.fixed_bytes
    feasible = _close(
        room,
        _ROUNDS,
        until,
        model.recomputable,
        model.held,
        model.reads_start,
        model.reads,
        model.owns_start,
        model.owns,
        model.storage_node,
        model.storage_bytes,
        model.workspace_bytes,
        open_slots,
        certain,
        instant_bytes,
    )
    return Liveness(open_slots, certain, instant_bytes, bool(feasible))


@kernel
def _close(
    room: int,
    rounds: int,
    until: Numbers,
    recomputable: Flags,
    held: Flags,
    reads_start: Indices,
    reads: Indices,
    owns_start: Indices,
    owns: Indices,
    storage_node: Indices,
    storage_bytes: Numbers,
    workspace_bytes: Numbers,
    open_slots: Bytes,
    certain: Bytes,
    instant_bytes: Numbers,
) -> bool:
    """Fill the three tables; false where an instant does not fit."""
    nodes = len(recomputable) - 1
    slot_bytes = np.zeros(nodes + 2, np.int64)
    for node in range(nodes):
        if recomputable[node]:
            open_slots[node, node + 1 : until[node] + 1] = 1
    for _ in range(rounds):
        _mark_certain(held, reads_start, reads, storage_node, open_slots, certain)
        slot_bytes[:] = 0
        for storage in range(len(storage_node)):
            for slot in range(storage_node[storage] + 1, nodes + 1):
                if certain[storage, slot] == 1:
                    slot_bytes[slot] += storage_bytes[storage]
        changed = False
        for node in range(nodes):
            own = workspace_bytes[node]
            for i in range(owns_start[node], owns_start[node + 1]):
                own += storage_bytes[owns[i]]
            for slot in range(node + 1, until[node] + 1):
                if open_slots[node, slot] == 0:
                    continue
                step = own + slot_bytes[slot]
                for i in range(reads_start[node], reads_start[node + 1]):
                    if certain[reads[i], slot] == 0:
                        step += storage_bytes[reads[i]]
                if step > room:
                    open_slots[node, slot] = 0
                    changed = True
        if not changed:
            break
    feasible = True
    for node in range(nodes + 1):
        total = workspace_bytes[node]
        for i in range(owns_start[node], owns_start[node + 1]):
            total += storage_bytes[owns[i]]
        for i in range(reads_start[node], reads_start[node + 1]):
            if certain[reads[i], node + 1] == 0 and not held[reads[i]]:
                total += storage_bytes[reads[i]]
        for storage in range(len(storage_node)):
            if storage_node[storage] < node and (certain[storage, node + 1] == 1 or held[storage]):
                total += storage_bytes[storage]
        instant_bytes[node] = total
        if total > room:
            feasible = False
    return feasible


@kernel
def _mark_certain(
    held: Flags,
    reads_start: Indices,
    reads: Indices,
    storage_node: Indices,
    open_slots: Bytes,
    certain: Bytes,
) -> None:
    """A storage is live from the last slot open to its node until the instant that reads it."""
    nodes = len(reads_start) - 2
    for storage in range(len(storage_node)):
        if held[storage]:
            certain[storage, storage_node[storage] + 1 : nodes + 1] = 1
    for instant in range(nodes + 1):
        for i in range(reads_start[instant], reads_start[instant + 1]):
            storage = reads[i]
            slot = instant
            base = storage_node[storage]
            while slot > base and open_slots[base, slot] == 0:
                certain[storage, slot] = 1
                slot -= 1
