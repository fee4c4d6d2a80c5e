"""Computes evicted storages again, in room that is planned for.

A rebuild is planned before it begins: which calls are made again in which order, and what is kept until when. Where everything
that is gone does not fit at once, results are computed more than once instead.
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
# Of planning, beside what the program's operators took, after which it goes on above the budget.
_PLANNED_NS = 1_000_000_000
_ATTEMPTS = 30  # at a rebuild, each of which finds out what scratch one more operator takes


@dataclass(slots=True)
class Experience:
    """What rebuilds found out and later ones need not: orders of calls within little memory, and how much memory kinds of
    calls take beyond their results. ``planning_ns``: what that took in all runs, and ``operator_ns``, what the program's own
    operators did in those that have ended."""

    orders: OrderCache = field(default_factory=OrderCache)
    scratch_bytes: dict[Hashable, int] = field(default_factory=dict)
    planning_ns: int = 0
    operator_ns: int = 0


class Rebuilder:
    """Brings evicted nodes of ``memory`` back."""

    def __init__(self, memory: Memory, executor: Executor, experience: Experience) -> None:
        self.memory = memory
        self.executor = executor
        self.experience = experience
        self.orders, self.scratch_bytes = experience.orders, experience.scratch_bytes

    def complete(self, needs: Iterable[Node]) -> None:
        """Have all of them there at once; they are locked. What the program has released meanwhile is gone, too."""
        self.memory.release_dead()
        if missing := [node for node in needs if node.evicted]:
            self.rebuild(missing)

    def rebuild(self, targets: list[Node]) -> None:
        """Compute evicted nodes again and, before them, whatever that reads and is gone, in room that is planned for.

        The scratch of operators is not known beforehand: where it was too much, the plan is made again with what was learnt.
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
        """Results of one call, which are gone, from what it reads; what of that is gone is rebuilt first."""
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
        """Everything that is gone once, and all that is there and read kept until then; ``None`` where there is no room, and
        another way is to be looked for."""
        calls, there = calls_behind(targets, self._scratch_of)
        plan = make_plan(calls, targets, there)
        if plan.peak_bytes <= self.memory.free_bytes() or plan.peak_bytes <= self.memory.available_bytes():
            return plan
        plan = make_plan(sorted(calls), targets, there)
        return plan if plan.peak_bytes <= self.memory.available_bytes() or self._has_planned_enough() else None

    def _has_planned_enough(self) -> bool:
        """Whether to go on above the budget, where that may be: a program of many small operators would hardly go on at all."""
        program_ns = self.experience.operator_ns + self.memory.counters.operator_ns
        return self.memory.may_exceed and self.experience.planning_ns > _PLANNED_NS + program_ns

    def _rebuild_in_less(self, targets: list[Node]) -> bool:
        """From what cannot be computed again onwards, and some results more than once.

        ``targets`` grows: what waiting operators read may go in between as well.
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
        """Make the calls of the plan; false where one took more scratch than was known, which is known now."""
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
        # What the program has let go of meanwhile, and nothing is computed from any more, is not made.
        makes = [node for node in step.makes if node.resident or node.call is not None]
        needs = self.memory.lock_all((*makes, *makes[0].parents)) if makes else ()
        for node in step.done:
            if node in live:
                del live[node]
                node.locks -= 1
        if not makes:
            return
        try:
            self.complete(makes[0].parents)  # the program may have released one in the meantime
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
        """Make the recorded call again; its results go where they were."""
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
        """What the operator returns again, random numbers included, and its time in ns."""
        if call.draw is None:
            return self.executor.run(call.operator, args, kwargs)
        drawing = call.operator.with_generator(len(args))
        if drawing is None:
            with call.draw.replayed():
                return self.executor.run(call.operator, args, kwargs)
        with call.draw.again() as generator:
            return self.executor.run(drawing, args, {**kwargs, "generator": generator})

    def _own_copy(self, call: OperatorCall) -> dict[Node, UntypedStorage]:
        """For a call that writes: the old version, in a storage of its own that the call may change."""
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
        """A copy from the allocator that is counted, which is not where ``UntypedStorage.clone`` takes it from."""
        tensor = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copy, _ = self.executor.run(_CLONE, (tensor,), {})
        return storage_of(copy)


def _kind(call: OperatorCall) -> Hashable:
    """Calls that take the same scratch."""
    return call.operator, *((view.size, view.dtype) for view in views_in(call.args, call.kwargs))


def refused_bytes(error: RuntimeError, memory: Memory) -> int:
    """By how much an allocation that was refused exceeded the limit; 0 where a rebuild found no room. Raises other errors."""
    if not isinstance(error, (torch.OutOfMemoryError, RebuildError)) and "can't allocate memory" not in str(error):
        raise error
    return memory.take_missing_bytes()
