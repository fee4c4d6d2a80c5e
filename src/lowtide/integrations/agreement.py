"""One plan for all processes of a distributed training that run the same program.

Measured times differ from process to process, and so would plans. So a program and its settings have a key, and the
processes meet at that key in the store of the default process group: the first one to come measures and plans, the others
take its plan, check and simulate it on their own graph.

No collective is involved, and nobody waits for a process that does not plan: ranks that see different shapes in a step, or
different models, ask for different keys and do not meet. A planner that fails says so, and the others plan (and fail) by
themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch

from lowtide.capture.program import Program
from lowtide.cost.columns import program_device
from lowtide.cost.devices import device_name
from lowtide.errors import PlanError
from lowtide.ir import Costs, check, simulate
from lowtide.ir.serial import schedule_from_json, schedule_to_json
from lowtide.planning import Plan

_LOG = logging.getLogger(__name__)
_PATIENCE_SECONDS = 1800.0  # how long a plan may take to be made elsewhere; then it is made here
_POLL_SECONDS = 0.02


def agreed_plan(program: Program, asked: Any, make: Callable[[], Plan]) -> Plan:
    """The plan that the first process to ask for this program made with ``make``; here, if this is the first.

    ``asked`` is whatever else a plan depends on; its ``repr`` must be the same in all processes.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    key = f"lowtide/{program_key(program, asked)}"
    if store.add(f"{key}/asked", 1) != 1:
        plan = _wait(store, key, program)
        return make() if plan is None else plan
    message = b""
    try:
        plan = make()
        message = encode(plan)
    finally:
        store.set(f"{key}/plan", message)  # type: ignore[arg-type]  # bytes are taken too
    return plan


def program_key(program: Program, asked: Any) -> str:
    """Equal for programs whose plans can be exchanged: the same graph, layouts, kind of device and settings."""
    graph, device = program.graph, program_device(program)
    where = device_name(device) if device.type != "meta" else "meta"
    ops = [(op.target, op.inputs, op.outputs, op.phase.value, op.random, op.effect) for op in graph.ops]
    values = [(value.storage, value.dtype, value.shape) for value in graph.values]
    sizes = [meta.storage_bytes for meta in program.metas]
    ends = (graph.inputs, graph.forward_outputs, graph.outputs, graph.forward_ops)
    return hashlib.sha256(repr((ops, values, sizes, ends, where, asked)).encode()).hexdigest()


def _wait(store: Any, key: str, program: Program) -> Plan | None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not store.check([f"{key}/plan"]):
        if time.monotonic() > deadline:
            _LOG.warning("no plan has come from another process in %.0f s; it is made here", _PATIENCE_SECONDS)
            return None
        time.sleep(_POLL_SECONDS)
    message = bytes(store.get(f"{key}/plan"))
    return decode(message, program) if message else None


_NUMBERS = ("planner", "budget_bytes", "unconstrained_peak_bytes", "lower_bound_ns", "seed", "solve_seconds")
_COLUMNS = ("time_ns", "workspace_bytes", "storage_bytes")


def encode(plan: Plan) -> bytes:
    """The plan without its graph, compressed."""
    costs = plan.costs
    data = {
        "schedule": schedule_to_json(plan.schedule),
        "costs": {name: getattr(costs, name).tolist() for name in _COLUMNS},
        "rng_state_bytes": costs.rng_state_bytes,
        "device": costs.device,
        **{name: getattr(plan, name) for name in _NUMBERS},
    }
    return zlib.compress(json.dumps(data).encode())


def decode(message: bytes, program: Program) -> Plan:
    """Inverse of ``encode`` for the process's own program. Raises ``ScheduleError`` where the schedule is not valid for it."""
    data = json.loads(zlib.decompress(message))
    costs = Costs(**data["costs"], rng_state_bytes=data["rng_state_bytes"], device=data["device"])
    schedule = schedule_from_json(data["schedule"])
    check(program.graph, schedule)
    result = simulate(program.graph, costs, schedule)
    if result.peak_bytes > data["budget_bytes"]:
        raise PlanError(f"a plan from another process peaks at {result.peak_bytes} bytes of {data['budget_bytes']}.")
    return Plan(
        graph=program.graph,
        costs=costs,
        schedule=schedule,
        peak_bytes=result.peak_bytes,
        time_ns=result.time_ns,
        **{name: data[name] for name in _NUMBERS},
    )
