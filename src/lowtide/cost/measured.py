"""Costs measured on the device in use: every distinct operator call once, on synthetic tensors, one operator's at a time.

An operator is run six times or more: the first run warms up, the others are timed, and the allocator's peak during them, less
the storages that the op returns, is the workspace. Of the storages returned and the captured ones, the larger bytes count.
Operators whose times scatter, and that take more than next to nothing of a step, are timed again once all others are done,
when what disturbed them may be over; their least time counts.

Everything that the caller could notice is put back: generator states, gradient mode, autocast, garbage collection.
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
_BUDGET_NS = 15_000_000  # per signature
_SCATTERED = 0.25  # spread over time, from which an operator is timed again
_AGAIN = 3  # times at most
_NEGLIGIBLE = 0.001  # of the time of a step, up to which an operator is not timed again
# Kernels that return the state for their backward only where gradients are recorded.
_NEEDS_GRAD_MODE = ("aten.mkldnn_rnn_layer.default",)
_NOT_RUN = (TANGENT_TARGET, EXPECT_TARGET, *STATE_TARGETS)  # what states take to come and go is that of a second memory
# What operators take, by signature; ``None``: they cannot be run by themselves.
_BYTES: dict[str, OperatorCost | None] = {}
_MOST_KNOWN = 1 << 14  # of these
_SAID: set[str] = set()  # why operators could not be run
_ARGUMENT = -1  # output group of what lives in an argument's storage
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, IndexError)  # raised of tensors that an operator is not made for


def measure_costs(
    program: Program, *, cache: CostCache | None = None, on_progress: Callable[[str, float], None] | None = None
) -> Costs:
    """Time and workspace of every op of ``program`` on its device.

    ``cache`` defaults to the file of this device and torch version; ``CostCache(None)`` keeps nothing.
    ``on_progress(text, fraction)`` is called as signatures are measured.
    """
    together = collective_costs(program)
    apart = {op for op, call in enumerate(program.calls) if isinstance(call.target, Waited)}.union(together)
    ops = [op.id for op in program.graph.ops if op.target not in _NOT_RUN and op.id not in apart]
    records, failed = measure_operators(program, ops, cache=cache, on_progress=on_progress)
    for reason in dict.fromkeys(reason for reason in failed.values() if reason):
        if reason not in _SAID and len(_SAID) < _MOST_KNOWN:  # a plan may take the costs of several forms of a program
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
    """The costs of ``ops``, and of those that cannot be run on synthetic tensors why, nothing where there is no room for that
    now (``cost.room``). Arguments as of ``measure_costs``."""
    device = program_device(program)
    cache = CostCache.open(device) if cache is None else cache
    report = on_progress or (lambda text, fraction: None)
    keys = {op: signature(program, op) for op in ops}

    def missing() -> dict[str, int]:
        return {k: op for op, k in keys.items() if cache.get(k, len(program.graph.ops[op].outputs)) is None}

    failed: dict[str, str] = {}
    if missing():
        room = room_for(program)
        with cache.measuring(), _undisturbed(device):  # another process may have measured the same meanwhile
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
    """What recurrent layers keep for the backward pass is as large as they say when they run, and so is the room for it."""
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
    """Add the costs of the ``missing`` to ``cache``, each of an op by its signature; by signature that cannot be run, why.

    Operators whose repetitions scattered are timed again, until they do not; the least time is kept. ``uses`` tells how often
    each signature is run in a step.
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
    """Workspaces and storages of every op of ``program``, each distinct operator run once in a process: that takes a fraction
    of a step. Times are those of ``like``, of the same operators at other sizes."""
    ops = [op for op in program.graph.ops if op.target not in _NOT_RUN]
    workspace, real, device = [0] * len(program.graph.ops), storage_bytes(program), program_device(program)
    room = functools.cache(room_for)  # which takes longer than to find that all are known
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
    """What an operator allocates, without its time; ``None`` where it cannot be run by itself."""
    call = program.calls[op]
    try:
        target, results = _runnable(call.target), list[Any]()
        args, kwargs, tensors = synthetic_arguments(program, op, drawn=False)
        if hasattr(call.target, "rehearsal") or device.type != "cpu":
            target(*args, **kwargs)  # the first time it takes what it keeps, or what its library does
        with unseen(call.target):
            peak_bytes = peak_of(lambda: results.append(target(*args, **kwargs)), device)
        return OperatorCost(0, 0, peak_bytes, *_returned(results.pop(), call.positions, tensors))
    except _CANNOT_RUN:
        return None


def measure_operator(program: Program, op: int, device: torch.device) -> OperatorCost:
    """Run one operator of ``program`` on synthetic tensors. Raises whatever it raises."""
    call = program.calls[op]
    target = _runnable(call.target)
    args, kwargs, tensors = synthetic_arguments(program, op)
    before = _restoring(call, args)
    with unseen(call.target):
        output_bytes, output_groups = _returned(target(*args, **kwargs), call.positions, tensors)
        timing = time_call(lambda: target(*args, **kwargs), device, _BUDGET_NS, before)
    return OperatorCost(timing.time_ns, timing.spread_ns, timing.peak_bytes, output_bytes, output_groups)


def _restoring(call: Call, args: tuple[Any, ...]) -> Callable[[], Any]:
    """Gives an argument that the call writes over its numbers back: they would shrink or grow with every repetition, at
    last to ones that take longer."""
    position = overwritten_argument(call.target)
    if position is None:
        return lambda: None
    first = args[position].clone()
    return lambda: args[position].copy_(first)


def synthetic_arguments(
    program: Program, op: int, *, drawn: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The call's arguments, and the distinct tensors among them; ``drawn`` as of ``synthetic_tensor``."""
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
    """What runs in the place of an operator. Raises ``NotImplementedError`` where nothing may."""
    if declares_effect(target) or isinstance(target, Waited):
        raise NotImplementedError("it has an effect")
    rehearsal = getattr(target, "rehearsal", None)
    if rehearsal is not None:  # of an update that an optimizer makes, on a state of its own
        made: Callable[..., Any] = rehearsal()
        return made
    return torch.enable_grad()(target) if target_name(target) in _NEEDS_GRAD_MODE else target


def _opaque(program: Program, value: int) -> torch.Tensor | None:
    """What one operator keeps for another (the workspace of a recurrent layer, the seed of an attention) must really come from
    it.

    A backward operator reads pointers and sizes from it, or reads it on the host; what is made up would crash the process.
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
    """(bytes of the storage, group) of each output, see ``OperatorCost``."""
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
    """The op's workspace, after raising ``real`` where the storages returned are larger than captured. An output that was
    taken for a view but has bytes of its own is charged to the storage that it was to view, or to the workspace where that is
    external."""
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
    """Inside, generator states, gradient mode, autocast and garbage collection are lowtide's; afterwards the caller's."""
    with (
        collector_held(),  # what it frees in the middle of an operator would be missing from that operator's peak
        generators.all_kept(),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield
