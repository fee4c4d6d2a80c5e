"""Costs measured on the present device: every distinct operator call is run alone, on synthetic tensors.

An operator runs six times or more. The first run warms up; the others are timed. The allocator's peak in them, less the
storages that the op returns, is the workspace. If returned and captured storages differ in size, the larger counts.

If an operator's times scatter, and it is not a negligible part of a step, it is timed again after all others, when a
disturbance may be over. Its least time counts.

All global state is restored: generator states, gradient mode, autocast, garbage collection.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lowtide.cost.analytical import operand_bytes, operator_time_ns
from lowtide.cost.cache import CostCache, OperatorCost
from lowtide.cost.collectives import collective_costs
from lowtide.cost.devices import device_name, device_of
from lowtide.cost.on_links import collective_workspace
from lowtide.cost.room import measured_in_bytes, room_for, unmeasured_workspace
from lowtide.cost.signature import is_lasting, origin_of, signature, target_name
from lowtide.cost.synthetic import make_valid, synthetic_tensor
from lowtide.cost.timing import peak_of, time_call
from lowtide.device import interface_of
from lowtide.ir import Costs, Op
from lowtide.ir.graph import EXPECT_TARGET, STATE_TARGETS, TANGENT_TARGET
from lowtide.memory.allocators import round_up
from lowtide.memory.collector import collector_held
from lowtide.program import generators
from lowtide.program.distributed.collectives import Waited
from lowtide.program.foreign import declares_effect, unseen
from lowtide.program.layouts import copies_storage, memory_of
from lowtide.program.overwrites import overwritten_argument
from lowtide.program.program import Call, Program, Ref
from lowtide.program.references import map_references
from lowtide.program.sizes import program_device, storage_bytes

_LOG = logging.getLogger(__name__)
_BUDGET_NS = 15_000_000  # time for each signature
_SCATTERED = 0.25  # spread / time, above which an operator is timed again
_AGAIN = 3  # most repetitions of this
_NEGLIGIBLE = 0.001  # of the time of a step: operators below are not timed again
# Kernels that return state for their backward pass only if gradients are enabled.
_NEEDS_GRAD_MODE = ("aten.mkldnn_rnn_layer.default",)
_NOT_RUN = (TANGENT_TARGET, EXPECT_TARGET, *STATE_TARGETS)  # transfers of states cost what the second memory says
# Costs of operators by signature; ``None`` if an operator cannot be run alone.
_BYTES: dict[str, OperatorCost | None] = {}
_MOST_KNOWN = 1 << 14  # most entries of these caches
_SAID: set[str] = set()  # reasons already logged
_ARGUMENT = -1  # output group of outputs in an argument's storage
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, IndexError)  # errors of operators on unsuitable tensors


def measure_costs(
    program: Program, *, cache: CostCache | None = None, on_progress: Callable[[str, float], None] | None = None
) -> Costs:
    """Time in ns and workspace in bytes of every op of ``program`` on its device.

    ``cache`` defaults to the file of this device and PyTorch version; ``CostCache(None)`` keeps nothing.
    ``on_progress(text, fraction)`` is called while operators are measured.
    """
    together = collective_costs(program)
    apart = {op for op, call in enumerate(program.calls) if isinstance(call.target, Waited)}.union(together)
    ops = [op.id for op in program.graph.ops if op.target not in _NOT_RUN and op.id not in apart]
    records, failed = measure_operators(program, ops, cache=cache, on_progress=on_progress)
    for reason in dict.fromkeys(reason for reason in failed.values() if reason):
        if reason not in _SAID and len(_SAID) < _MOST_KNOWN:  # several forms of a program may fail alike
            _SAID.add(reason)
            _LOG.warning("%s; its cost is estimated", reason)
    time_ns, workspace = ([0] * len(program.graph.ops) for _ in range(2))
    real, device = storage_bytes(program), program_device(program)
    rates = device_of(device)
    for op in ops:
        if op in records:
            time_ns[op], workspace[op] = records[op].time_ns, _settle(program, program.graph.ops[op], records[op], real)
        else:
            time_ns[op] = operator_time_ns(program, op, rates)
            workspace[op] = operand_bytes(program, op) if failed[op] else unmeasured_workspace(program, op)
    for op in apart.difference(together):
        time_ns[op], workspace[op] = operator_time_ns(program, op, rates), collective_workspace(program, op) or 0
    for op, (time, peak) in together.items():
        made = {program.graph.values[value].storage for value in program.graph.ops[op].outputs}
        time_ns[op], workspace[op] = time, max(0, peak - sum(real[storage] for storage in made))
    beside = interface_of(device).overlaps and any(op.collective for op in program.graph.ops)
    return Costs(time_ns, workspace, real, device=device_name(device), collectives_beside=beside)  # type: ignore[arg-type]


def measure_operators(
    program: Program,
    ops: Sequence[int],
    *,
    cache: CostCache | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> tuple[dict[int, OperatorCost], dict[int, str]]:
    """Return the costs of ``ops``, and for those that cannot be run on synthetic tensors the reason, empty if there is
    just no room for them now (``cost.room``). Arguments as for ``measure_costs``."""
    device = program_device(program)
    cache = CostCache.open(device) if cache is None else cache
    report = on_progress or (lambda text, fraction: None)
    keys = {op: signature(program, op) for op in ops}

    def missing() -> dict[str, int]:
        return {k: op for op, k in keys.items() if cache.get(k, len(program.graph.ops[op].outputs)) is None}

    failed: dict[str, str] = {}
    if missing():
        room = room_for(program)
        with cache.measuring(), _undisturbed(device):  # another process may have measured them meanwhile
            left = missing()
            now = {key: op for key, op in left.items() if _fits(program, op, room)}
            failed = dict.fromkeys(left.keys() - now.keys(), "")
            failed |= _measure(program, now, Counter(keys.values()), cache, report)
    report("measuring operators", 1.0)
    known = {op: cache.costs[key] for op, key in keys.items() if key not in failed}
    for op, cost in known.items():
        _keep_bytes(keys[op], cost)
    return known, {op: failed[key] for op, key in keys.items() if key in failed}


def _fits(program: Program, op: int, room: int | None) -> bool:
    """Whether an operator may run in ``room`` bytes. Always true for recurrent layers: only a run tells the size of
    what they keep for the backward pass."""
    recurrent = target_name(program.calls[op].target).startswith("aten.mkldnn_rnn_layer")
    return room is None or recurrent or measured_in_bytes(program, op) <= room


def _keep_bytes(key: str, cost: OperatorCost | None) -> None:
    if len(_BYTES) >= _MOST_KNOWN:
        _BYTES.clear()
    _BYTES[key] = cost


def _measure(
    program: Program,
    missing: dict[str, int],
    uses: Mapping[str, int],
    cache: CostCache,
    report: Callable[[str, float], None],
) -> dict[str, str]:
    """Measure the ``missing`` signatures, each by one op, and add them to ``cache``. Returns the reason for each that
    cannot be run.

    Operators with scattered times are timed again, and their least time is kept. ``uses``: how often each signature
    occurs in a step.
    """
    device, failed = program_device(program), dict[str, str]()
    for again in range(1 + _AGAIN):
        scattered: dict[str, int] = {}
        for count, (key, op) in enumerate(missing.items()):
            if not again:
                report("measuring operators", count / len(missing))
            try:
                cost = measure_operator(program, op, device)
            except _CANNOT_RUN as error:
                if not again:
                    name, summary = target_name(program.calls[op].target), str(error).split("\n")[0]
                    failed[key] = f"{name} cannot be run on synthetic tensors ({summary})"
                continue
            if not again or cost.time_ns < cache.costs[key].time_ns:
                cache.put(key, cost, keep=is_lasting(key))
            if cost.spread_ns > _SCATTERED * cost.time_ns:
                scattered[key] = op
        step_ns = sum(cache.costs[key].time_ns * count for key, count in uses.items() if key in cache.costs)
        least_ns = _NEGLIGIBLE * step_ns
        missing = {key: op for key, op in scattered.items() if cache.costs[key].time_ns * uses[key] > least_ns}
    return failed


def measure_bytes(program: Program, like: Costs) -> Costs:
    """Workspaces and storages of every op of ``program``; each distinct operator runs once per process, in a fraction
    of a step's time. Times are those of ``like``, for the same operators at other sizes."""
    ops = [op for op in program.graph.ops if op.target not in _NOT_RUN]
    workspace, real, device = [0] * len(program.graph.ops), storage_bytes(program), program_device(program)
    room = functools.cache(room_for)  # slow: only if an operator is not known
    with _undisturbed(device):
        for op in ops:
            key = signature(program, op.id)
            if key not in _BYTES:
                if not _fits(program, op.id, room(program)):
                    workspace[op.id] = unmeasured_workspace(program, op.id)
                    continue
                _keep_bytes(key, _bytes_of(program, op.id, device))
            record = _BYTES[key]
            if record is None or len(record.output_bytes) != len(op.outputs):
                workspace[op.id] = operand_bytes(program, op.id)
            else:
                workspace[op.id] = _settle(program, op, record, real)
    return Costs(like.time_ns, workspace, real, device=like.device)  # type: ignore[arg-type]


def _bytes_of(program: Program, op: int, device: torch.device) -> OperatorCost | None:
    """The bytes that an operator allocates, without its time; ``None`` if it cannot be run alone."""
    call = program.calls[op]
    try:
        target, results = _runnable(call.target), list[Any]()
        args, kwargs, tensors = synthetic_arguments(program, op, drawn=False)
        if hasattr(call.target, "rehearsal") or device.type != "cpu":
            target(*args, **kwargs)  # the first run allocates lasting state of operator or library
        with unseen(call.target):
            peak_bytes = peak_of(lambda: results.append(target(*args, **kwargs)), device)
        return OperatorCost(0, 0, peak_bytes, *_returned(results.pop(), call.positions, tensors))
    except _CANNOT_RUN:
        return None


def measure_operator(program: Program, op: int, device: torch.device) -> OperatorCost:
    """Run one operator of ``program`` on synthetic tensors. Raises the operator's errors."""
    call = program.calls[op]
    target = _runnable(call.target)
    args, kwargs, tensors = synthetic_arguments(program, op)
    before = _restoring(call, args)
    with unseen(call.target):
        output_bytes, output_groups = _returned(target(*args, **kwargs), call.positions, tensors)
        timing = time_call(lambda: target(*args, **kwargs), device, _BUDGET_NS, before)
    return OperatorCost(timing.time_ns, timing.spread_ns, timing.peak_bytes, output_bytes, output_groups)


def _restoring(call: Call, args: tuple[Any, ...]) -> Callable[[], Any]:
    """A function that restores the argument that the call overwrites. Otherwise its numbers would shrink or grow with
    each repetition, until operators become slower."""
    position = overwritten_argument(call.target)
    if position is None:
        return lambda: None
    first = args[position].clone()
    return lambda: args[position].copy_(first)


def synthetic_arguments(
    program: Program, op: int, *, drawn: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The call's arguments, and the distinct tensors among them. ``drawn``: as for ``synthetic_tensor``."""
    tensors: dict[int, torch.Tensor] = {}
    call, whole = program.calls[op], copies_storage(program.calls[op].target)

    def tensor(ref: Ref) -> torch.Tensor:
        if ref.value not in tensors:
            made = _opaque(program, ref.value)
            meta = program.metas[ref.value]
            tensors[ref.value] = synthetic_tensor(meta, whole=whole, drawn=drawn) if made is None else made
        return tensors[ref.value]

    args, kwargs = map_references((call.args, call.kwargs), tensor)
    make_valid(target_name(call.target), args)
    return args, kwargs, list(tensors.values())


def _runnable(target: Callable[..., Any]) -> Callable[..., Any]:
    """The callable to run for an operator. Raises ``NotImplementedError`` if it must not run."""
    if declares_effect(target) or isinstance(target, Waited):
        raise NotImplementedError("it has an effect")
    rehearsal = getattr(target, "rehearsal", None)
    if rehearsal is not None:  # an optimizer's update, on separate state
        made: Callable[..., Any] = rehearsal()
        return made
    return torch.enable_grad()(target) if target_name(target) in _NEEDS_GRAD_MODE else target


def _opaque(program: Program, value: int) -> torch.Tensor | None:
    """The tensor that one operator keeps for another (the workspace of a recurrent layer, the seed of attention),
    produced by running it.

    A backward operator reads pointers and sizes from it, or reads it on the host, so invented values could crash the
    process.
    """
    producer = origin_of(program, value)
    if producer is None:
        return None
    call = program.calls[producer]
    args, kwargs, _ = synthetic_arguments(program, producer)
    with unseen(call.target):
        result = _runnable(call.target)(*args, **kwargs)
    index = program.graph.ops[producer].outputs.index(value)
    made = result if call.positions is None else result[call.positions[index]]
    return made if isinstance(made, torch.Tensor) else None


def _returned(
    result: Any, positions: tuple[int, ...] | None, arguments: list[torch.Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each output: the bytes of its storage, and its group; see ``OperatorCost``."""
    outputs = [result] if positions is None else [result[position] for position in positions]
    groups = {memory_of(tensor): _ARGUMENT for tensor in arguments}
    sizes, numbers = [0] * len(outputs), [_ARGUMENT] * len(outputs)
    for index, output in enumerate(outputs):
        if isinstance(output, torch.Tensor):
            storage = output.untyped_storage()
            numbers[index] = groups.setdefault(storage._cdata, len(groups))
            sizes[index] = 0 if numbers[index] == _ARGUMENT else round_up(storage.nbytes(), output.device)
    return tuple(sizes), tuple(numbers)


def _settle(program: Program, op: Op, record: OperatorCost, real: list[int]) -> int:
    """Return the op's workspace, and raise ``real`` where a returned storage is larger than the captured one. If an
    output was captured as a view but has its own bytes, they are charged to the storage of its base, or to the
    workspace if that is external."""
    values, storages = program.graph.values, program.graph.storages
    returned: dict[int, dict[int, int]] = {}  # storage -> group -> bytes
    for value, nbytes, group in zip(op.outputs, record.output_bytes, record.output_groups, strict=True):
        if group != _ARGUMENT:
            returned.setdefault(values[value].storage, {})[group] = nbytes
    kept = 0
    for storage, groups in returned.items():
        fresh = sum(groups.values())
        if storages[storage].base == op.id:
            kept += fresh
            real[storage] = max(real[storage], fresh)
        elif fresh:
            _LOG.warning("%s was captured as a view but returns %d bytes of its own", op.name, fresh)
            if not storages[storage].external:
                kept += fresh
                real[storage] += fresh
    return max(0, record.peak_bytes - kept)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """A context with gradients, autocast and garbage collection off. All of these and the generator states are
    restored."""
    with (
        collector_held(),  # memory freed during an operator would lower its measured peak
        generators.all_kept(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
