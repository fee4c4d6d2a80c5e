"""A graph as flat arrays for searches and compiled kernels, with view operators folded into the storages that they view.

A *node* is an operator that must be scheduled: it allocates storages or may run only once. Nodes keep the order of
their op ids; node ``nodes`` stands for the end of the program and reads the outputs. A *view* is an operator that
allocates nothing: a node that uses its result reads the storage (and all else that the view reads) and *needs* the view,
which is formed again for every renewal of the storage in which it is needed. Dead operators are dropped.

An operator that may overwrite an input without other readers (``Op.overwrites``) always does so: its workspace is reduced by
the bytes that it allocates, and may be negative. If the input has other readers, overwriting depends on the schedule
(``overs``): searches over sequences take that into account, others count new memory always, or never (``floor``).

Ragged tables are stored as ``x_start`` and ``x``: the entries of row ``i`` are ``x[x_start[i]:x_start[i + 1]]``.

A sequence of nodes is *encoded* as codes: a first compute of node ``x`` is ``x``, a recompute ``~x``, and the end node comes
last. A sequence of op ids found on this model becomes a schedule through ``lowtide.ir.schedule_from_sequence``. The model
errs only upwards: the peak and time that the simulator reports for the schedule never exceed those found here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.ir import Costs, Graph, may_run_early, needed_ops
from lowtide.solve.model.ragged import inverse, owners, ragged, rows

Indices = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_GAPS = 8192


class CompactGraph(NamedTuple):
    """The arrays of a graph: ``nodes`` rows and one more for the end; storages and views are renumbered. Kernels call it ``t``
    (for tables)."""

    nodes: int
    boundary: int  # the first backward node
    fixed_bytes: int
    rng_state_bytes: int
    constant_ns: int  # time of views of external storages
    faithful: bool  # bytes are exact
    bounding: bool  # bytes are exact or a lower bound
    op_of_node: Indices
    time_ns: Numbers
    workspace_bytes: Numbers  # beyond owns and reads; a view's is charged to the nodes that need it
    recomputable: Flags  # node
    random: Flags  # node
    reads_start: Indices  # node -> storages
    reads: Indices
    read_node: Indices  # index in reads -> node
    gaps: Indices  # indices in reads, drawn with weights that grow with bytes x wait since the previous use
    owns_start: Indices  # node -> storages it allocates
    owns: Indices
    needs_start: Indices  # node -> views
    needs: Indices
    overs_start: Indices  # node -> storages that it overwrites if this is their last use
    overs: Indices
    replaced_start: Indices  # node -> the nodes whose storages it always overwrites
    replaced: Indices
    views_start: Indices  # storage -> its views
    views: Indices
    view_time_ns: Numbers
    view_storage: Indices  # view -> the storage that it views, -1 if that is external
    needers_start: Indices  # view -> the nodes that need it, ascending
    needers: Indices
    storage_bytes: Numbers
    storage_node: Indices  # storage -> the node that allocates it
    uses_start: Indices  # storage -> the nodes that read it, ascending
    uses: Indices
    handed: Flags  # storage -> handed to the caller: never freed after the forward pass
    held: Flags  # storage -> handed to the caller, and never freed once computed
    overwritten: Flags  # storage -> whether a node overwrites it at its last use

    def reads_of(self, node: int) -> Indices:
        """The storages that the node reads."""
        return self.reads[self.reads_start[node] : self.reads_start[node + 1]]

    def owns_of(self, node: int) -> Indices:
        """The storages that the node allocates."""
        return self.owns[self.owns_start[node] : self.owns_start[node + 1]]

    @property
    def least_ns(self) -> int:
        """Time of the program without recomputes and views."""
        return int(self.time_ns.sum()) + self.constant_ns

    def sequence(self, nodes: Iterable[int]) -> list[int]:
        """Return the op ids of a sequence of nodes.

        A recompute of a node is left out if nothing that it always overwrites was recomputed since it last ran: its earlier
        result still lies in the memory of that input.
        """
        replaced = rows(self.replaced_start, self.replaced)
        last: dict[int, int] = {}
        kept: list[int] = []
        for position, node in enumerate(nodes):
            sources = replaced[node]
            if sources and node in last and all(last.get(source, -1) < last[node] for source in sources):
                continue
            last[node] = position
            kept.append(int(self.op_of_node[node]))
        return kept


def encode_keep_all(model: CompactGraph) -> Indices:
    """Return the codes of the program without recomputation: every node once."""
    return np.arange(model.nodes + 1, dtype=np.int32)


def encode(model: CompactGraph, ops: Iterable[int]) -> Indices:
    """Return the codes of op ids in the order in which they are computed, without views and dead ops."""
    node_of = {int(op): node for node, op in enumerate(model.op_of_node)}
    codes: list[int] = []
    seen: set[int] = set()
    for node in (node_of[op] for op in ops if op in node_of):
        codes.append(~node if node in seen else node)
        seen.add(node)
    return np.array([*codes, model.nodes], np.int32)


def decode(model: CompactGraph, codes: Indices) -> list[int]:
    """Return the op ids of an encoded sequence, without the end."""
    nodes = np.where(codes < 0, ~codes, codes)
    return model.sequence(nodes[nodes < model.nodes])


def compact(
    graph: Graph, costs: Costs, *, floor: bool = False, released: bool = False, present: bool = False
) -> CompactGraph:
    """Convert a graph into flat arrays.

    By default forward outputs are held from their first compute on, as most searches need. ``released``: they may be freed and
    recomputed before the hand-over, as exact searches and bounds must allow. ``floor``: released, and bytes that depend on the
    schedule are not counted, so that lower bounds and infeasibility proven on the model hold for the graph. ``present``:
    released, for searches that do not know the boundary: every later node reads the storages that were handed over."""
    return _Compaction(graph, costs, floor, released or floor or present, present).build()


class _Compaction:
    """Builds the tables of a ``CompactGraph``, in the order of the ops."""

    def __init__(self, graph: Graph, costs: Costs, floor: bool, released: bool, present: bool) -> None:
        self.graph = graph
        self.costs = costs
        self.floor = floor
        self.present = present
        self.views = {op.id for op in graph.ops if graph.views[op.id]}
        self.needed = needed_ops(graph)
        self.handed = {*graph.storages_of(graph.forward_outputs)}
        self.held = set() if released else self.handed
        self.recomputable = {op.id for op in graph.ops if op.recomputable} - self._pinned_bases()
        self.node_of_op = {op: node for node, op in enumerate(sorted(self.needed - self.views))}
        bases = {storage.id: storage.base for storage in graph.storages}
        kept = [storage for storage, base in sorted(bases.items()) if base is not None and base in self.node_of_op]
        self.storage_index = {storage: index for index, storage in enumerate(kept)}
        self.view_index = {op: index for index, op in enumerate(sorted(self.views & self.needed))}
        self.closure: dict[int, tuple[frozenset[int], frozenset[int]]] = {}

    def build(self) -> CompactGraph:
        graph, costs = self.graph, self.costs
        ops = sorted(self.node_of_op)
        uses = [self._uses(graph.ops[op].inputs) for op in ops]
        owns = [[s for s in graph.made[op] if graph.storages[s].base == op] for op in ops]
        forward = sum(op < graph.forward_ops for op in ops)
        uses.append(self._uses((*graph.outputs, *graph.forward_outputs)))
        owns.append([])
        self._hand_over(uses, owns, forward)
        view_ops = sorted(self.view_index)
        on_storage = [self._view_storage(op) for op in view_ops]
        external = [op for op, storage in zip(view_ops, on_storage, strict=True) if storage is None]
        views_on: dict[int | None, list[int]] = {storage: [] for storage in (*self.storage_index, None)}
        for view, storage in enumerate(on_storage):
            views_on[storage].append(view)
        kept = list(self.storage_index)
        replaced, at_times = self._overwrites(ops, uses)
        exact_views = not any(costs.workspace_bytes[op] or self._reads_elsewhere(op) for op in view_ops)
        index, nodes = self.storage_index, range(len(ops) + 1)
        tables = _tables(
            reads=[[index[s] for s in sorted(read)] for read, _ in uses],
            owns=[[index[s] for s in allocated] for allocated in owns],
            needs=[[self.view_index[v] for v in sorted(seen - {*external})] for _, seen in uses],
            views=[views_on[storage] for storage in kept],
            overs=[at_times.get(node, ()) for node in nodes],
            replaced=[replaced.get(node, ()) for node in nodes],
        )
        tables["uses_start"], tables["uses"] = inverse(tables["reads_start"], tables["reads"], len(kept))
        tables["needers_start"], tables["needers"] = inverse(tables["needs_start"], tables["needs"], len(view_ops))
        model = CompactGraph(
            nodes=len(ops),
            boundary=forward,
            fixed_bytes=graph.fixed_bytes,
            rng_state_bytes=costs.rng_state_bytes,
            constant_ns=sum(int(costs.time_ns[op]) for op in external),
            faithful=exact_views and not (at_times or self.floor),
            bounding=exact_views and not at_times,
            time_ns=np.array([*costs.time_ns[ops], 0], np.int64),
            workspace_bytes=self._workspace(ops, uses, owns, replaced),
            recomputable=np.array([*(op in self.recomputable for op in ops), False], np.bool_),
            random=np.array([*(graph.ops[op].random for op in ops), False], np.bool_),
            view_time_ns=costs.time_ns[view_ops] if view_ops else np.zeros(0, np.int64),
            storage_bytes=costs.storage_bytes[kept] if kept else np.zeros(0, np.int64),
            handed=np.array([s in self.handed for s in kept], np.bool_),
            held=np.array([s in self.held for s in kept], np.bool_),
            overwritten=np.isin(np.arange(len(kept)), tables["overs"]),
            op_of_node=np.array(ops, np.int32),
            read_node=np.repeat(np.arange(len(ops) + 1, dtype=np.int32), np.diff(tables["reads_start"])),
            gaps=tables["reads"],
            storage_node=np.array([self.node_of_op[_base(graph, s)] for s in kept], np.int32),
            view_storage=owners(tables["views_start"], tables["views"], len(view_ops)),
            **tables,
        )
        return model._replace(gaps=_gaps(model))

    def _hand_over(
        self, uses: list[tuple[frozenset[int], frozenset[int]]], owns: Sequence[Sequence[int]], forward: int
    ) -> None:
        """Make the forward outputs live at the boundary, by a read of the last node before it, or of the first node after it if
        they may be recomputed after that last node."""
        if not forward:
            return
        place = forward - 1 if self.held else forward
        storages, views = self._uses(self.graph.forward_outputs)
        read, needed = uses[place]
        uses[place] = (read | storages - {*owns[place]}, needed | views)
        for node in range(forward + 1, len(uses)) if self.present else ():
            uses[node] = (uses[node][0] | storages - {*owns[node]}, uses[node][1])

    def _uses(self, values: Iterable[int]) -> tuple[frozenset[int], frozenset[int]]:
        """Return the internal storages that must be read and the view ops that are needed to have these values."""
        found = [self._value_uses(value) for value in values]
        return frozenset().union(*(storages for storages, _ in found)), frozenset().union(
            *(views for _, views in found)
        )

    def _value_uses(self, value: int) -> tuple[frozenset[int], frozenset[int]]:
        """As ``_uses`` for one value, cached. Views that lead to it have earlier op ids, so the cache fills in order."""
        if value not in self.closure:
            storage, producer = self.graph.values[value].storage, self.graph.values[value].producer
            own = frozenset({storage}) if storage in self.storage_index else frozenset()
            result = (own, frozenset[int]())
            if producer in self.views and producer is not None:
                inner = self._uses(self.graph.ops[producer].inputs)
                result = (own | inner[0], inner[1] | {producer})
            self.closure[value] = result
        return self.closure[value]

    def _view_storage(self, op: int) -> int | None:
        return next((storage for storage in self.graph.made[op] if storage in self.storage_index), None)

    def _reads_elsewhere(self, view: int) -> bool:
        """Whether the view op reads an internal storage other than the one that it views."""
        return bool(self._uses(self.graph.ops[view].inputs)[0] - {self._view_storage(view)})

    def _workspace(
        self,
        ops: list[int],
        uses: Sequence[tuple[frozenset[int], frozenset[int]]],
        owns: Sequence[Sequence[int]],
        replaced: dict[int, tuple[int, ...]],
    ) -> Numbers:
        """Return the workspace of every node. That of the views that it needs is used before its own storages exist."""
        anywhere = {op.id for op in self.graph.ops if self.floor and may_run_early(self.graph, op)}
        workspace = [*(0 if op in anywhere else int(self.costs.workspace_bytes[op]) for op in ops), 0]
        for node, (_, views) in enumerate(uses):
            own = sum(int(self.costs.storage_bytes[storage]) for storage in owns[node])
            workspace[node] -= own if node in replaced else 0
            workspace[node] = max([workspace[node], *(int(self.costs.workspace_bytes[view]) - own for view in views)])
        return np.array(workspace, np.int64)

    def _overwrites(
        self, ops: list[int], uses: Sequence[tuple[frozenset[int], frozenset[int]]]
    ) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """Return ``replaced`` and ``overs`` by node. With ``floor``, overwriting that depends on the schedule counts as
        ``replaced``, with no nodes listed."""
        readers = Counter(storage for storages, _ in uses for storage in storages)
        replaced: dict[int, tuple[int, ...]] = {}
        at_times: dict[int, tuple[int, ...]] = {}
        free = self.storage_index.keys() - self.held
        for node, op in enumerate(ops):
            storages = [one for one in self.graph.storages_of(self.graph.ops[op].overwrites) if one in free]
            always = [storage for storage in storages if readers[storage] == 1]
            if always or (storages and self.floor):
                replaced[node] = tuple(self.node_of_op[_base(self.graph, storage)] for storage in always)
            elif storages:
                at_times[node] = tuple(self.storage_index[storage] for storage in storages)
        return replaced, at_times

    def _pinned_bases(self) -> set[int]:
        """Return the ops that must not be recomputed since a renewal would lose values: bases of storages into which another
        node puts a value (and that node), and bases of storages of which one view op puts values into several."""
        pinned: set[int] = set()
        for op in self.graph.ops:
            bases = {_base(self.graph, storage) for storage in self.graph.made[op.id]} - {-1, op.id}
            if op.id not in self.views:
                pinned |= bases | {op.id} if bases else bases
            elif len(bases) > 1:
                pinned |= bases
        return pinned


def bounding_model(graph: Graph, costs: Costs, model: CompactGraph) -> CompactGraph:
    """Return ``model`` if bounds on it hold for every schedule of the graph, else the ``floor`` model, whose bounds do."""
    return model if model.bounding and not model.held.any() else compact(graph, costs, floor=True)


def released_model(graph: Graph, costs: Costs, model: CompactGraph) -> CompactGraph:
    """Return ``model`` if it holds no storage that a schedule could free, else the ``released`` model of the graph."""
    return compact(graph, costs, released=True) if model.held.any() else model


def _tables(**tables: Sequence[Sequence[int]]) -> dict[str, Indices]:
    """Return ``x_start`` and ``x`` for the rows of each table ``x``."""
    arrays: dict[str, Indices] = {}
    for name, lists in tables.items():
        arrays[f"{name}_start"], arrays[name] = ragged(lists)
    return arrays


def _gaps(model: CompactGraph) -> Indices:
    """Draw reads at which recomputing may pay: evenly, weighted by the root of bytes x nodes since the storage's last use."""
    weights = np.zeros(len(model.reads))
    last = model.storage_node.astype(np.int64)
    for read, (storage, node) in enumerate(zip(model.reads, model.read_node, strict=True)):
        if model.recomputable[model.storage_node[storage]] and not model.held[storage]:
            weights[read] = np.sqrt(float(model.storage_bytes[storage]) * (node - last[storage] - 1))
        last[storage] = node
    total = weights.sum()
    if total == 0:
        return np.arange(len(weights), dtype=np.int32)
    return np.asarray(np.searchsorted(np.cumsum(weights), (np.arange(_GAPS) + 0.5) / _GAPS * total), np.int32)


def _base(graph: Graph, storage: int) -> int:
    base = graph.storages[storage].base
    return -1 if base is None else base
