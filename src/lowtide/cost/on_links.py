"""The collectives of a program, from its operators: how many bytes they move among which ranks, and their workspace."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from lowtide.cost.links import KINDS, Link, collective_ns
from lowtide.program.distributed.collectives import Waited
from lowtide.program.distributed.sharded import Gather, Reduce
from lowtide.program.program import Call, Program

_UNKNOWN_RANKS = 2  # least size of a group unknown in this process


class Collective(NamedTuple):
    """``bytes``: as for ``links.collective_ns``. ``members``: the ranks of its group, empty if unknown in this
    process."""

    kind: str
    bytes: int
    ranks: int
    members: tuple[int, ...]

    def time_ns(self, link: Link) -> int:
        return collective_ns(self.kind, self.bytes, self.ranks, link)


def collectives_in(program: Program, op: int) -> tuple[Collective, ...]:
    """The collectives that an op runs: none for other operators, two for the reduction of a unit with replicas."""
    target, node = program.calls[op].target, program.graph.ops[op]
    if isinstance(target, (Gather, Reduce)):
        shards, *replicas = (tuple(torch.distributed.get_process_group_ranks(group)) for group in target.unit.groups)
        moved = _moved_bytes(target)
        if isinstance(target, Gather):
            return (Collective("all_gather", moved, len(shards), shards),)
        again = (Collective("all_reduce", moved // len(shards), len(each), each) for each in replicas)
        return (Collective("reduce_scatter", moved, len(shards), shards), *again)
    if not isinstance(target, Waited):
        return ()
    name = target.operator._schema.name.split("::")[1].removeprefix("shard_dim_").replace("alltoall", "all_to_all")
    kind = next((one for one in KINDS if name.startswith(one)), "")
    ranks, members = _group(target, program.calls[op])
    values = node.outputs if kind == "all_gather" else node.inputs
    size = sum(meta.dtype.itemsize * math.prod(meta.shape) for meta in (program.metas[value] for value in values))
    return (Collective(kind, size, ranks, members),) if kind else ()


def collective_workspace(program: Program, op: int) -> int | None:
    """Bytes that a collective takes beside its operands and results; ``None`` for other operators.

    For a sharded unit: the flat buffer for gathering, or for reducing gradients (plus this rank's part, if that is then
    converted). For a functional collective: its input or output size, whichever is larger, but nothing for an
    all-reduce.
    """
    target, node = program.calls[op].target, program.graph.ops[op]
    if isinstance(target, Gather):
        return _moved_bytes(target)
    if isinstance(target, Reduce):
        moved = _moved_bytes(target)
        return moved + (0 if target.dtype == target.unit.parameters[0].dtype else moved // target.unit.ranks)
    if not isinstance(target, Waited):
        return None
    if "all_reduce" in target.__name__:
        return 0
    return max(sum(program.metas[value].storage_bytes for value in set(each)) for each in (node.inputs, node.outputs))


def _moved_bytes(target: Gather | Reduce) -> int:
    """Bytes of the flat buffer. A gather moves the whole unit, even if only a part is read."""
    unit = target.unit
    if isinstance(target, Gather):
        return sum(unit.padded_elements(index) * form.dtype.itemsize for index, form in enumerate(unit.forms))
    return sum(map(unit.padded_elements, target.chosen)) * target.dtype.itemsize


def _group(target: Waited, call: Call) -> tuple[int, tuple[int, ...]]:
    """The size and the ranks of the group of a functional collective."""
    names = [argument.name for argument in target.operator._schema.arguments]
    given: dict[str, Any] = dict(zip(names, call.args, strict=False)) | call.kwargs
    try:
        group = torch.distributed.distributed_c10d._resolve_process_group(given["group_name"])  # type: ignore[attr-defined]
        members = tuple(torch.distributed.get_process_group_ranks(group))
        return len(members), members
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return int(given.get("group_size") or len(given.get("input_split_sizes") or ()) or _UNKNOWN_RANKS), ()
