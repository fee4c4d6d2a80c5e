"""One plan for all processes of a distributed training that run the same program.

Measured times differ between processes, and so would plans. So a program with its settings has a key, and processes
meet at that key in the store of the default process group. The first one measures and plans; the others take its plan,
and check and simulate it on their own graph.

This uses no collective, so no rank waits for one that does not plan: ranks with other shapes or models use other keys.
If the planner fails, it says so in the store, and the others plan (and fail) by themselves.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from lowtide.cost.devices import device_name
from lowtide.planning import Plan
from lowtide.program.program import Program
from lowtide.program.sizes import program_device
from lowtide.store import content_key

_LOG = logging.getLogger(__name__)
_PATIENCE_SECONDS = 1800.0  # how long to wait for another process's plan before planning here
_POLL_SECONDS = 0.02
_CALLS_AHEAD = 4  # from the publication of a better plan to its exchange


def several_processes() -> bool:
    """Whether this process is one of several in a distributed training (not with the ``fake`` backend)."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and distributed.get_backend() != "fake"


def agreed_plan(program: Program, asked: Any, make: Callable[[], Plan]) -> Plan:
    """The plan for this program from the first process that asked for it, made with ``make`` if this is the first one.

    ``asked``: everything else that the plan depends on, as parts that ``content_key`` takes.
    """
    store = default_store()
    key = f"lowtide/{program_key(program, asked)}"
    if store.add(f"{key}/asked", 1) != 1:
        return _made_elsewhere(store, key, program) or make()
    message = None
    try:
        plan = make()
        message = plan.to_json(graph=False)
    finally:
        tell(store, f"{key}/plan", message)
    return plan


class Successors:
    """Better plans for a program that several processes run. One process ``leads`` and searches; all exchange a plan at
    the same call.

    Each process counts its own calls. Processes whose steps wait for each other are at the same call, within one. A
    process that is ahead exchanges when it hears of the plan.
    """

    def __init__(self, program: Program, plan: Plan) -> None:
        self.program = program
        self._store = default_store()
        self._key = f"lowtide/better/{program_key(program, (plan.budget_bytes, plan.planner))}"
        self._number = 0  # number of the next plan
        self._total: int | None = None  # number of plans, once the search has ended
        self.leads = self._store.add(f"{self._key}/leads", 1) == 1

    def publish(self, plan: Plan, call: int) -> int:
        """Publish a plan. Returns the call at which all exchange it, a few after this one."""
        at = call + _CALLS_AHEAD
        tell(self._store, f"{self._key}/{self._number}", (at, plan.to_json(graph=False)))
        self._number += 1
        return at

    def end(self, more: int) -> None:
        """Tell that the search has ended and ``more`` plans will still be published."""
        self._store.set(f"{self._key}/total", str(self._number + more))

    def have_ended(self) -> bool:
        if self._total is None and self._store.check([f"{self._key}/total"]):
            self._total = int(self._store.get(f"{self._key}/total"))
        return self._total is not None

    def take(self) -> tuple[int, Plan] | None:
        """The next published plan, with the call at which to exchange it, or ``None``; never waits."""
        if self.have_ended() and self._number == self._total:
            return None
        if not self._store.check([f"{self._key}/{self._number}"]):
            return None
        at, plan = told(self._store, f"{self._key}/{self._number}")
        self._number += 1
        return at, Plan.from_json(plan, self.program.graph)

    @property
    def are_through(self) -> bool:
        """Whether all plans have been taken."""
        return self._total is not None and self._number == self._total


def program_key(program: Program, asked: Any) -> str:
    """A key that is equal for programs that can exchange plans: same graph, layouts, kind of device and settings.

    Equal parts of one storage that one operator returns count as one value; each rank continues with its own.
    """
    graph, device = program.graph, program_device(program)
    where = device_name(device) if device.type != "meta" else "meta"
    values = [(value.storage, value.dtype, value.shape) for value in graph.values]

    def named(read: Sequence[int]) -> list[Any]:
        return [(graph.values[value].producer, values[value]) for value in read]

    ops = [(op.target, named(op.inputs), op.outputs, op.phase.value, op.random, op.effect) for op in graph.ops]
    sizes = [meta.storage_bytes for meta in program.metas]
    ends = (graph.inputs, named(graph.forward_outputs), named(graph.outputs), graph.forward_ops)
    return content_key(repr((ops, values, sizes, ends)), where, asked)


def _made_elsewhere(store: Any, key: str, program: Program) -> Plan | None:
    """Another process's plan, applied to this process's graph. Raises ``ScheduleError`` if its schedule is not valid
    here."""
    patience = min(_PATIENCE_SECONDS, _timeout_seconds())
    deadline = time.monotonic() + patience
    while not store.check([f"{key}/plan"]):
        if time.monotonic() > deadline:
            _LOG.warning("no plan has come from another process in %.0f s; it is made here", patience)
            return None
        time.sleep(_POLL_SECONDS)
    plan = told(store, f"{key}/plan")
    return None if plan is None else Plan.from_json(plan, program.graph)


def _timeout_seconds() -> float:
    """The timeout of the default process group's collectives: a process that takes longer counts as dead."""
    if not torch.distributed.is_initialized():  # only the store exists
        return _PATIENCE_SECONDS
    group = torch.distributed.distributed_c10d._get_default_group()
    device = next(iter(group._device_types), torch.device("cpu"))
    timeout = getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
    return _PATIENCE_SECONDS if timeout is None else float(timeout.total_seconds())


def default_store() -> Any:
    """The store that all processes share."""
    return torch.distributed.distributed_c10d._get_default_store()


def tell(store: Any, key: str, message: Any) -> None:
    """Put ``message`` (a JSON value or ``None``) at ``key``."""
    store.set(key, zlib.compress(msgspec.json.encode(message)))


def told(store: Any, key: str) -> Any:
    """Wait for the message at ``key`` and return it."""
    return msgspec.json.decode(zlib.decompress(bytes(store.get(key))))
