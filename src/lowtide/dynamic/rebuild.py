"""Rebuilds evicted storages by plans that fit the available memory.

A rebuild is planned before it begins: which calls are run again, in which order, and how long each result is held. If all
missing results do not fit at once, some are computed more than once instead.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage

from lowtide.dynamic import statistics
from lowtide.dynamic.executor import Executor
from lowtide.dynamic.failures import RebuildError
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import WRITTEN, Node, OperatorCall, View, mapped, storage_of, tensors_of, views_in
from lowtide.dynamic.operators import Operator, values_at
from lowtide.dynamic.orders import OrderCache
from lowtide.dynamic.plan import RebuildPlan, RebuildStep, calls_behind, make_plan, with_what_is_there
from lowtide.dynamic.storages import fill
from lowtide.errors import ExecutionError

_CLONE = Operator(torch.ops.aten.clone.default)
# Most planning time on top of the operators' time, if the run may exceed its budget; then it goes on above the budget.
_PLANNED_NS = 1_000_000_000
_ATTEMPTS = 30  # at a rebuild; each failed one learns the scratch of one more kind of call


@dataclass(slots=True)
class Experience:
    """What rebuilds have learnt for later ones: orders of calls that need little memory, and the scratch of each kind of
    call. ``planning_ns``: planning time over all runs. ``operator_ns``: time of the program's own operators in the runs
    that have ended."""

    orders: OrderCache = field(default_factory=OrderCache)
    scratch_bytes: dict[Hashable, int] = field(default_factory=dict)
    planning_ns: int = 0
    operator_ns: int = 0


class Rebuilder:
    """Rebuilds evicted nodes of ``memory``."""

    def __init__(self, memory: Memory, executor: Executor, experience: Experience) -> None:
        self.memory = memory
        self.executor = executor
        self.experience = experience
        self.orders, self.scratch_bytes = experience.orders, experience.scratch_bytes

    def complete(self, needs: Iterable[Node]) -> None:
        """Make all of ``needs``, which are locked, resident at the same time. Processes released storages first."""
        self.memory.release_dead()
        if missing := [node for node in needs if node.evicted]:
            self.rebuild(missing)

    def rebuild(self, targets: list[Node]) -> None:
        """Recompute evicted nodes and, before them, their evicted ancestors, by a plan that fits the memory.

        The scratch of operators is not known beforehand: if it exceeds the plan, plans again with the scratch learnt.
        """
        began = statistics.now_ns()
        if not self.memory.rebuilds:
            self.memory.rebuild_began_ns = began
        try:
            for _ in range(_ATTEMPTS):
                targets = [node for node in targets if not node.resident]
                plan = self._plan(targets)
                if self._rebuild_in_less(targets) if plan is None else self._follow(plan):
                    return
            raise RebuildError(1)
        finally:
            if not self.memory.rebuilds:
                self.memory.counters.rematerialize_ns += statistics.now_ns() - began

    def make_again(self, nodes: Sequence[Node]) -> None:
        """Recompute evicted results of one call; rebuild its evicted inputs first."""
        needs = self.memory.lock_all((*nodes, *nodes[0].parents))
        try:
            self.complete(nodes[0].parents)
            if call := nodes[0].call:
                began = statistics.now_ns()
                self._compute(call, nodes)
                if not self.memory.rebuilds:
                    self.memory.counters.rematerialize_ns += statistics.now_ns() - began
        finally:
            self.memory.unlock_last(needs)

    def _plan(self, targets: list[Node]) -> RebuildPlan | None:
        """Return a plan that makes each missing call once and holds resident inputs until their last read; ``None`` if it
        does not fit and a plan with less memory must be searched."""
        calls, there = calls_behind(targets, self._scratch_of)
        plan = make_plan(calls, targets, there)
        if plan.peak_bytes <= self.memory.free_bytes() or plan.peak_bytes <= self.memory.available_bytes():
            return plan
        plan = make_plan(sorted(calls), targets, there)
        return plan if plan.peak_bytes <= self.memory.available_bytes() or self._has_planned_enough() else None

    def _has_planned_enough(self) -> bool:
        """Whether to exceed the budget, if allowed, because planning takes too long, as for many small operators."""
        program_ns = self.experience.operator_ns + self.memory.counters.operator_ns
        return self.memory.may_exceed and self.experience.planning_ns > _PLANNED_NS + program_ns

    def _rebuild_in_less(self, targets: list[Node]) -> bool:
        """Rebuild with less memory: from constants onwards, computing some results more than once.

        Appends to ``targets``: the inputs of waiting operators may be evicted and rebuilt in between as well.
        """
        memory = self.memory
        waiting = () if memory.rebuilds else memory.locked[memory.started :]
        nodes = [node for needs in waiting for node in needs]
        locks = {node: node.locks for node in nodes if node.call is not None and not node.pinned}
        targets += [node for node in locks if node.resident]
        for node in locks:
            node.locks = 0
        began = statistics.now_ns()
        try:
            plan = self._plan_in_less(targets, memory.available_bytes())
            self.experience.planning_ns += statistics.now_ns() - began
            return self._follow(plan)
        finally:
            for node, count in locks.items():
                node.locks += count

    def _plan_in_less(self, targets: list[Node], room_bytes: int) -> RebuildPlan:
        calls, there = calls_behind(targets, self._scratch_of, deep=True)
        calls.sort()
        plan = with_what_is_there(calls, targets, there, room_bytes)
        if plan.peak_bytes > room_bytes >= sum(node.size_bytes for node in targets):
            order = self.orders.within(room_bytes, calls, targets)
            plan = with_what_is_there(order, targets, there, room_bytes)
        if plan.peak_bytes > room_bytes and not self.memory.may_exceed:
            raise RebuildError(plan.peak_bytes - room_bytes)
        return plan

    def _follow(self, plan: RebuildPlan) -> bool:
        """Run the calls of the plan; return false if one took more scratch than known, after recording it."""
        room_bytes = self.memory.available_bytes()
        live = dict.fromkeys(plan.given)
        for node in live:
            node.locks += 1
        self.memory.rebuilds += 1
        step = None
        try:
            for step in plan.steps:
                self._take(step, live)
        except RuntimeError as error:
            missing_bytes = refused_bytes(error, self.memory)
            if step is None or missing_bytes <= 0:
                raise
            kind, more_bytes = _kind(step.call.recorded), room_bytes - step.peak_bytes + missing_bytes
            self.scratch_bytes[kind] = self.scratch_bytes.get(kind, 0) + max(more_bytes, 1)
            return False
        finally:
            self.memory.rebuilds -= 1
            for node in live:
                node.locks -= 1
            if self.memory.banish and not self.memory.rebuilds:
                for step in plan.steps:
                    for node in step.makes:
                        self.memory.release(node)
        return True

    def _take(self, step: RebuildStep, live: dict[Node, None]) -> None:
        # Skip results that the program has released meanwhile and that nothing depends on any more.
        makes = [node for node in step.makes if node.resident or node.call is not None]
        needs = self.memory.lock_all((*makes, *makes[0].parents)) if makes else ()
        for node in step.done:
            if node in live:
                del live[node]
                node.locks -= 1
        if not makes:
            return
        try:
            self.complete(makes[0].parents)  # an input the program released meanwhile may be gone
            if not all(node.resident for node in makes):
                self._compute(step.call.recorded, makes)
            for node in makes:
                live[node] = None
                node.locks += 1
        finally:
            self.memory.unlock_last(needs)

    def _scratch_of(self, call: OperatorCall) -> int:
        return self.scratch_bytes.get(_kind(call), 0) if self.scratch_bytes else 0

    def _compute(self, call: OperatorCall, wanted: Sequence[Node]) -> None:
        """Run the recorded call again, and move its results into their old storages."""
        version = call.results.get(WRITTEN)
        own = {} if version is None else self._own_copy(call)

        def filled(value: Any) -> Any:
            if not isinstance(value, View):
                return value
            storage = own[value.node] if value.node in own else value.node.storage()
            if storage is None:
                raise ExecutionError("an argument of a call that is made again is gone")
            return value.of(storage)

        args = mapped(filled, call.args)
        kwargs = {name: mapped(filled, value) for name, value in call.kwargs.items()}
        with torch.set_grad_enabled(call.grad):
            result, cost_ns = self._run(call, args, kwargs)
        self.memory.pool.tick(cost_ns)
        self.memory.counters.rematerializations += 1
        if version is not None:
            (storage,) = own.values()
            self._place(version, storage)
            return
        tensors = tensors_of(result)
        for place, sibling in list(call.results.items()):
            if not sibling.resident and (sibling in wanted or sibling.alive()):
                self._place(sibling, storage_of(tensors[place]))

    def _run(self, call: OperatorCall, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """Run the call's operator again, with the same random numbers. Returns its result and its time in ns."""
        if call.draw is None:
            return self.executor.run(call.operator, args, kwargs)
        drawing = call.operator.with_generator(len(args))
        if drawing is None:
            with call.draw.replayed():
                return self.executor.run(call.operator, args, kwargs)
        with call.draw.again() as generator:
            return self.executor.run(drawing, args, {**kwargs, "generator": generator})

    def _own_copy(self, call: OperatorCall) -> dict[Node, UntypedStorage]:
        """For a call that writes in place, return the old version with a storage that the call may overwrite."""
        (old,) = {view.node for view in views_in(values_at(call.operator.writes, call.args, call.kwargs), {})}
        storage = old.storage()
        if storage is None:
            raise ExecutionError("the old version of a storage is not there")
        if old.kept is not None and old.handle is None and old.locks <= 1 and not old.pinned:
            self.memory.pool.evict(old)
            self.memory.intermediates.pop(old, None)
            old.kept = None
            return {old: storage}
        return {old: self.clone(storage)}

    def _place(self, node: Node, source: UntypedStorage) -> None:
        storage = node.held_storage()
        if source.nbytes() != node.size_bytes:
            raise ExecutionError(f"{source.nbytes()} bytes were computed again where there had been {node.size_bytes}")
        if storage is None:
            node.kept = source
            self.memory.intermediates[node] = None
        else:
            fill(storage, source)
            if self.memory.ignore:
                node.kept = storage
        self.memory.pool.add(node)

    def clone(self, storage: UntypedStorage) -> UntypedStorage:
        """Copy a storage by an operator, since ``UntypedStorage.clone`` bypasses the counted allocator."""
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy, _ = self.executor.run(_CLONE, (tensor,), {})
        return storage_of(copy)


def _kind(call: OperatorCall) -> Hashable:
    """Return a key shared by calls assumed to take the same scratch: operator, sizes and types."""
    return call.operator, *((view.size, view.dtype) for view in views_in(call.args, call.kwargs))


def refused_bytes(error: RuntimeError, memory: Memory) -> int:
    """Return by how many bytes a refused allocation exceeded the limit, 0 if none was. Re-raises other errors."""
    if not isinstance(error, (torch.OutOfMemoryError, RebuildError)) and "can't allocate memory" not in str(error):
        raise error
    return memory.take_missing_bytes()
