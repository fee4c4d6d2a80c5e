"""Costs of the collectives of sharded parameters, measured by all ranks of a group together.

A collective ends when all of its ranks have reached it. So all ranks call ``measure_collectives`` for the same units in
the same order. A cached cost is measured again unless all ranks have it. All ranks use the longest time and the largest
peak of the group, so that all plan with the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from lowtide.cost.cache import CostCache, OperatorCost
from lowtide.cost.signature import target_name
from lowtide.cost.timing import peak_of
from lowtide.device import interface_of
from lowtide.program.distributed.gathers import sharded_collectives
from lowtide.program.distributed.sharded import Gather, Reduce
from lowtide.program.program import Program
from lowtide.program.sizes import program_device

_REPEATED = 5

_KNOWN: dict[str, tuple[int, ...]] = {}  # (time ns, peak bytes) by name, ranks and backend


def measure_collectives(program: Program) -> None:
    """Measure time and peak of unknown collectives in ``program``. All ranks of a unit's group must call it."""
    device = program_device(program)
    if device.type == "meta":
        return
    wanted = {key: (op, target) for op, target in sharded_collectives(program) if (key := _key(target)) not in _KNOWN}
    if not wanted:
        return
    cache = CostCache.open(device)
    for key, (op, target) in wanted.items():
        groups, kept = target.unit.groups, cache.get(key, 0)
        found = [0, 0] if kept is None else [kept.time_ns, kept.peak_bytes]
        if any(_most([int(kept is None)], groups, device)):
            metas = [program.metas[value] for value in program.graph.ops[op].inputs]
            gradients = [torch.zeros(meta.shape, dtype=meta.dtype, device=device) for meta in metas]
            call: Callable[..., Any] = target.rehearsal() if isinstance(target, Reduce) else target
            found = _measured(lambda call=call, given=gradients: call(*given), device)  # type: ignore[misc]
        time_ns, peak_bytes = _KNOWN[key] = tuple(_most(found, groups, device))
        cache.put(key, OperatorCost(time_ns, 0, peak_bytes, (), ()))
    cache.save()


def collective_costs(program: Program) -> Mapping[int, tuple[int, ...]]:
    """Time in ns and peak in bytes of the collectives of sharded parameters, by op."""
    keys = ((op, _key(target)) for op, target in sharded_collectives(program))
    return {op: _KNOWN[key] for op, key in keys if key in _KNOWN}


def _key(target: Gather | Reduce) -> str:
    groups = [
        f"{distributed.get_backend(group)}{distributed.get_process_group_ranks(group)}" for group in target.unit.groups
    ]
    return f"{target_name(target)}@{' '.join(groups)}"


def _measured(call: Callable[[], Any], device: torch.device) -> list[int]:
    call()
    peak = max(peak_of(call, device) for _ in range(2))
    clock = interface_of(device)
    return [min(clock.timed_ns(call) for _ in range(_REPEATED)), peak]


def _most(numbers: list[int], groups: Sequence[Any], device: torch.device) -> list[int]:
    """The maxima over all ranks that these groups connect."""
    together = torch.tensor(numbers, dtype=torch.int64, device=device)
    for group in groups:
        distributed.all_reduce(together, op=distributed.ReduceOp.MAX, group=group)
    return [int(number) for number in together.tolist()]
