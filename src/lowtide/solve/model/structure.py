"""The shape of a program: where its forward pass can be cut, and a smaller model of it whose schedules map back.

Articulation points are what the checkpointing and block planners cut at. ``merge_chains`` joins nodes that follow each
other and of which the first is read by the second alone. Both take linear time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.solve.model.compact import Compact, Indices, Numbers
from lowtide.solve.model.ragged import inverse, ragged, row


def articulation_points(model: Compact) -> list[int]:
    """Forward nodes ``c``, ascending, such that of what the nodes up to ``c`` allocate, later forward nodes read
    storages of ``c`` only.

    Neither external storages count nor those handed to the caller, which stay in any case, nor reads by a node that
    runs once only and gives nothing to the forward pass (a buffer's update), as nobody will recompute it. The last
    forward node is always one.
    """
    last = last_forward_use(model, updates=False)
    furthest = -1  # last forward use of any storage allocated before the node
    points = []
    for node in range(model.boundary):
        if furthest <= node:
            points.append(node)
        for storage in model.owns[model.owns_start[node] : model.owns_start[node + 1]]:
            if not model.held[storage]:
                furthest = max(furthest, int(last[storage]))
    return points


def last_forward_use(model: Compact, *, updates: bool = True) -> Numbers:
    """Per storage the last forward node that reads it, -1 where there is none.

    Without ``updates``, nodes that run once only and allocate nothing that forward nodes read are passed over.
    """
    last = np.full(len(model.storage_node), -1, np.int64)
    read = np.zeros(len(model.storage_node), np.bool_)
    read[model.reads[: model.reads_start[model.boundary]]] = True
    for node in range(model.boundary):
        if updates or model.recomputable[node] or read[row(model.owns_start, model.owns, node)].any():
            last[row(model.reads_start, model.reads, node)] = node
    return last


@dataclass(frozen=True, slots=True, eq=False)
class Reduction:
    """``model`` has one node for every group of nodes of the original; ``members[i]`` are the originals of node ``i``.

    Any sequence of nodes of ``model`` stands for the sequence that ``expand`` gives: its time is the same, its peak at
    most the one found on ``model``. Sequences that separate the members of a group are lost.
    """

    model: Compact
    members: tuple[tuple[int, ...], ...]

    def expand(self, nodes: Iterable[int]) -> list[int]:
        """Nodes of the original model; the end node is left out."""
        return [member for node in nodes if node < self.model.nodes for member in self.members[node]]

    def expand_codes(self, codes: Iterable[int]) -> Indices:
        """As ``expand`` for an encoded sequence (a recompute of ``x`` written ``~x``), its end kept."""
        original_end = sum(len(group) for group in self.members)
        expanded: list[int] = []
        for code in codes:
            node = code if code >= 0 else ~code
            group = self.members[node] if node < self.model.nodes else (original_end,)
            expanded.extend(group if code >= 0 else (~member for member in group))
        return np.array(expanded, np.int32)


def merge_chains(model: Compact, *, exact: bool = False) -> Reduction:
    """Join node ``b`` to the node ``a`` right before it where ``b`` alone reads what ``a`` allocates.

    The joint node holds the inputs of all its members from the first to the last, and as its workspace what the members
    need on top of its results: an upper bound on the peak. With ``exact`` only pairs are joined for which that bound is
    the true peak. Nothing handed to the caller is swallowed, nodes that may run once only are not joined to others, and
    a group has at most one random node.
    """
    groups = _groups(model, exact)
    swallowed = {int(s) for group in groups for node in group[:-1] for s in row(model.owns_start, model.owns, node)}
    return Reduction(_merged(model, groups, swallowed), tuple(tuple(group) for group in groups))


def _groups(model: Compact, exact: bool) -> list[list[int]]:
    readers = inverse(model.reads_start, model.reads, len(model.storage_node))
    groups: list[list[int]] = []
    for node in range(model.nodes):
        if groups and _joins(model, groups[-1], node, readers) and (not exact or _tight(model, groups[-1], node)):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _joins(model: Compact, group: list[int], node: int, readers: tuple[Indices, Indices]) -> bool:
    owned = row(model.owns_start, model.owns, group[-1])
    return (
        node != model.boundary
        and len(owned) > 0
        and all(row(*readers, storage).tolist() == [node] and not model.held[storage] for storage in owned)
        and bool(model.recomputable[group[-1]])
        and bool(model.recomputable[node])
        and not (model.random[node] and model.random[group].any())
    )


def _tight(model: Compact, group: list[int], node: int) -> bool:
    """Whether neither the inputs that the group alone reads nor a generator state raise the peak by staying longer."""
    if model.rng_state_bytes and (model.random[node] or model.random[group].any()):
        return False
    group_reads = {int(s) for member in group for s in row(model.reads_start, model.reads, member)}
    inner = {int(s) for member in group for s in row(model.owns_start, model.owns, member)}
    if group_reads - inner <= {int(s) for s in row(model.reads_start, model.reads, node)}:
        return True
    held = _bytes(model, row(model.owns_start, model.owns, group[-1]))
    need = held + int(model.workspace_bytes[node]) + _bytes(model, row(model.owns_start, model.owns, node))
    return need <= _needed_bytes(model, group)


def _bytes(model: Compact, storages: Indices) -> int:
    return int(model.storage_bytes[storages].sum())


def _needed_bytes(model: Compact, group: Sequence[int]) -> int:
    """The most that the members hold on top of their common inputs: what the one before gave, its own, workspace."""
    most, before = 0, 0
    for node in group:
        own = _bytes(model, row(model.owns_start, model.owns, node))
        most = max(most, before + own + int(model.workspace_bytes[node]))
        before = own
    return most


def _merged(model: Compact, groups: list[list[int]], swallowed: set[int]) -> Compact:
    kept = [storage for storage in range(len(model.storage_node)) if storage not in swallowed]
    number = {storage: index for index, storage in enumerate(kept)}
    inner_views = {int(v) for s in swallowed for v in row(model.views_start, model.views, s)}
    reads, needs, owns, times, workspaces = [], [], [], [], []
    for group in [*groups, [model.nodes]]:
        needed = {int(v) for node in group for v in row(model.needs_start, model.needs, node)}
        read = {int(s) for node in group for s in row(model.reads_start, model.reads, node)}
        owned = [int(s) for s in row(model.owns_start, model.owns, group[-1])] if group[-1] < model.nodes else []
        reads.append([number[s] for s in sorted(read - swallowed)])
        needs.append(sorted(needed - inner_views))
        owns.append([number[s] for s in owned])
        times.append(int(model.time_ns[group].sum()) + int(model.view_time_ns[sorted(needed & inner_views)].sum()))
        own_bytes = sum(int(model.storage_bytes[s]) for s in owned)
        last = group[-1] == model.nodes
        workspaces.append(int(model.workspace_bytes[-1]) if last else _needed_bytes(model, group) - own_bytes)
    group_of = {node: index for index, group in enumerate(groups) for node in group}
    reads_start, read_table = ragged(reads)
    needs_start, need_table = ragged(needs)
    owns_start, own_table = ragged(owns)
    views_start, view_table = ragged([[int(v) for v in row(model.views_start, model.views, s)] for s in kept])
    return dataclasses.replace(
        model,
        nodes=len(groups),
        op_of_node=np.array([model.op_of_node[group[-1]] for group in groups], np.int32),
        time_ns=np.array(times, np.int64),
        workspace_bytes=np.array(workspaces, np.int64),
        reads_start=reads_start,
        reads=read_table,
        owns_start=owns_start,
        owns=own_table,
        needs_start=needs_start,
        needs=need_table,
        views_start=views_start,
        views=view_table,
        storage_bytes=model.storage_bytes[kept],
        storage_node=np.array([group_of[int(model.storage_node[s])] for s in kept], np.int32),
        held=model.held[kept],
        recomputable=np.array([*(model.recomputable[group].all() for group in groups), False], np.bool_),
        random=np.array([*(model.random[group].any() for group in groups), False], np.bool_),
        boundary=sum(group[0] < model.boundary for group in groups),
        faithful=False,
        bounding=False,
        replaced={},
        at_times={},
    )
