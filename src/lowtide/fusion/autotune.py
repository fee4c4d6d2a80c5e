"""Replace library calls by the quickest routine on this machine: each is measured against its ATen operator.

A routine replaces the operator if it takes at least a tenth less time and not much more memory. Measurements are cached
with the costs of operators, so every process on a machine chooses alike, at every budget. In a training of several
processes, which might choose differently, ``pipeline`` does not call this.
"""

from __future__ import annotations

import dataclasses

import torch

from lowtide.cost.cache import CostCache, OperatorCost
from lowtide.cost.measured import measure_operators, synthetic_arguments
from lowtide.cost.signature import signature
from lowtide.fusion.comparison import compare
from lowtide.fusion.routines import Routine, is_available, routines
from lowtide.ir import keep_all_schedule, simulate
from lowtide.program.program import Program
from lowtide.program.sizes import byte_costs, program_device

_QUICKER = 0.9  # of the operator's time: a routine must take less
_OF_OPERANDS, _OF_PEAK = 16, 100  # divisors: additional memory that a routine may take
_agree: dict[str, bool] = {}  # whether a routine agrees, by signature


def autotuned(program: Program) -> Program:
    """``program`` with quicker routines in place of operators."""
    if program_device(program).type != "cpu" or not is_available():
        return program
    spare = _spare_bytes(program)
    found = {op.id: several for op in program.graph.ops if (several := routines(program, op.id, spare[op.id]))}
    chosen: dict[int, Routine] = {}
    cache = CostCache.open(program_device(program))
    own, _ = measure_operators(program, list(found), cache=cache)
    best = dict(own)
    for turn in range(max(map(len, found.values()), default=0)):
        candidates = {op: found[op][turn] for op in own if turn < len(found[op])}
        other = with_routines(program, candidates)
        records, _ = measure_operators(other, [op for op in candidates if _agrees(other, op, cache)], cache=cache)
        for op, record in records.items():
            if _is_better(record, best[op], own[op], spare[op]):
                best[op], chosen[op] = record, candidates[op]
    return with_routines(program, chosen)


def with_routines(program: Program, chosen: dict[int, Routine]) -> Program:
    calls = list(program.calls)
    for op, routine in chosen.items():
        calls[op] = dataclasses.replace(calls[op], target=routine)
    return dataclasses.replace(program, calls=tuple(calls))


def _is_better(record: OperatorCost, best: OperatorCost, own: OperatorCost, spare_bytes: int) -> bool:
    quicker = record.time_ns < min(best.time_ns, _QUICKER * own.time_ns)
    return quicker and record.peak_bytes <= own.peak_bytes + spare_bytes


def _spare_bytes(program: Program) -> list[int]:
    """For each op, the additional memory that a routine may take."""
    graph, costs = program.graph, byte_costs(program)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    operands = [{graph.values[value].storage for value in (*op.inputs, *op.outputs)} for op in graph.ops]
    return [
        max(sum(int(costs.storage_bytes[s]) for s in storages) // _OF_OPERANDS, peak // _OF_PEAK)
        for storages in operands
    ]


def _agrees(program: Program, op: int, cache: CostCache) -> bool:
    """Whether the routine of ``op`` gives the operator's results on synthetic tensors. A measured routine does."""
    key = signature(program, op)
    if cache.get(key, len(program.graph.ops[op].outputs)) is not None:
        return True
    if key not in _agree:
        routine = program.calls[op].target
        assert isinstance(routine, Routine)
        args, _, _ = synthetic_arguments(program, op)
        try:
            with torch.no_grad():
                _agree[key] = not compare(routine.operator(*args), routine.compute(*args))
        except RuntimeError:
            _agree[key] = False
    return _agree[key]
