"""Rerun passes that run out of memory although they keep to their plan: memory was taken by other processes, or by
tensors that no plan knows of.

The failed pass frees what it held. This, plus what was free beside it, is the new budget of all programs of the model.
The pass runs again from its start by a plan within it, with the same random numbers. A forward pass has changed nothing
by then, because buffers are written last. For a backward pass the forward program runs first, and writes nothing.
Gradients that were already returned come out equal to the bit and are dropped (``calls.call``).

A pass with effects that cannot be undone (an input written at once, ``capture.convert.updates``) is not rerun: the
error gets a note that says why. The same holds for the third failed step in a row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import traceback
from collections.abc import Collection
from typing import Protocol

import torch

from lowtide.device import interface_of
from lowtide.errors import InfeasibleBudgetError, LowtideError, PlanError
from lowtide.ir.graph import OPTIMIZER_TARGET, STATE_TARGETS
from lowtide.lower import Lowered
from lowtide.memory.allocators import allocated_bytes, device_memory, free_memory
from lowtide.memory.holders import holders
from lowtide.pipeline import lowered_plan
from lowtide.planning import Plan
from lowtide.program import Program, targets
from lowtide.program.distributed.sharded import is_sharded
from lowtide.program.sizes import program_device
from lowtide.runtime.programs.entry import Entry, Owner
from lowtide.runtime.programs.entry import lowered as lowered_by
from lowtide.sharing.agreement import several_processes
from lowtide.units import BYTE_UNITS, format_bytes, format_percent

_LOG = logging.getLogger(__name__)
_MOST_IN_A_ROW = 3  # failed steps in a row; the last one is not rerun
_LEAST_LOWERED = 0.03  # of the pass's peak; doubled for each further failure in a step, as the estimate was wrong
_UNKNOWN_LOWERED = 0.1  # if it is unknown how much was missing
# Errors without an exception class of their own: PyTorch's CPU allocator, and kernel libraries that allocate memory.
_NONE_LEFT = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|CUDA error: out of memory"
    r"|(?i:unable to find an engine to execute)"
)
_ASKED = re.compile(r"[tT]ried to allocate (\d+\.?\d*) ([KMGT]iB|bytes)")
_ADVICE = "Lower budget= by what is missing, make the batch smaller, or free what else is allocated."
_OURS = (targets.update, targets.keep_value, targets.tangent, targets.expect)  # effects that lowtide handles

Term = tuple[int, int]


class RunningCall(Protocol):
    """A call whose pass has failed. ``rescues``: how many of its passes failed before."""

    inputs: list[torch.Tensor]
    rescues: int

    def let_go(self) -> None: ...


class Rescue:
    """Reruns passes of the programs of ``owner``. ``in_a_row``: failed steps since the last one without a failure."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.in_a_row = 0

    def watch(self, entry: Entry) -> None:
        """Count allocated bytes from before the first pass of ``entry``."""
        if self._owner.settings.rescue and not self._owner.shares_budget:
            allocated_bytes(program_device(entry.program))

    def ended(self, call: RunningCall) -> None:
        """The backward pass of ``call`` has ended."""
        if not call.rescues:
            self.in_a_row = 0

    def again(
        self,
        call: RunningCall,
        lowered: Lowered,
        error: Exception,
        reason: str | None = None,
        left: Collection[Term] | None = None,
    ) -> Lowered | None:
        """Return the program with which a failed pass of ``call`` starts over.

        ``lowered``: what the pass ran; ``reason``: why a rerun is impossible, if the caller knows one; ``left``: the
        gradients that a backward pass has already returned, as terms. Returns ``None`` if the pass cannot be rerun,
        with a note in ``error``, or if ``error`` is not about memory.
        """
        owner, program = self._owner, lowered.program
        if not (owner.settings.rescue and ran_out(error)):
            return None
        entry = self._entry_of(program)
        reason = _never(owner, program) or reason or (None if entry else "its program is no longer kept")
        if reason is not None or entry is None:
            error.add_note(f"lowtide: this pass cannot run again by a lower plan: {reason}. {_ADVICE}")
            return None
        before, device = entry.plan, program_device(program)
        room = _room(call, error, device, before.peak_bytes)
        self.in_a_row += not call.rescues
        call.rescues += 1
        if self.in_a_row >= _MOST_IN_A_ROW:
            self._explain(error, call, before, device, f"memory ran out in {self.in_a_row} steps in a row")
            return None
        room = min(room, int((1 - _LEAST_LOWERED * 2 ** (call.rescues - 1)) * before.peak_bytes))
        try:
            now = self._lower(entry, max(room, 1), sum(_bytes(lowered, term) for term in left or ()))
        except (LowtideError, MemoryError, OSError) as failure:
            self._explain(error, call, before, device, str(failure))
            return None
        missing, phase = max(before.peak_bytes - room, 0), "forward" if left is None else "backward"
        _LOG.warning(
            "%s ran out of memory in its %s pass: %d bytes (%s) of the %d of its plan were missing. Its budget is %d bytes "
            "(%s) from now on instead of %d (%s), its overhead %s instead of %s; the pass runs again",
            type(owner.model).__name__, phase, missing, format_bytes(missing), before.peak_bytes, entry.plan.budget_bytes,
            format_bytes(entry.plan.budget_bytes), before.budget_bytes, format_bytes(before.budget_bytes),
            format_percent(entry.plan.overhead), format_percent(before.overhead),
        )  # fmt: skip
        return now

    def within(self, entry: Entry) -> Entry:
        """The entry, with a lower plan if the budget was lowered since it was planned and a lower plan exists."""
        most = self._owner.settings.most_bytes
        if most is None or entry.most_bytes == most:
            return entry
        entry.most_bytes = most
        if entry.plan.peak_bytes <= most:
            entry.plan = _with_budget(entry.plan, most)
            return entry
        with contextlib.suppress(InfeasibleBudgetError):
            self._put(entry, lowered_plan(entry.program, self._owner.settings, entry.plan))
        return entry

    def _lower(self, entry: Entry, room: int, left_bytes: int) -> Lowered:
        """Lower the budget to ``room`` plus the gradients already returned, which are not held when a pass begins.
        Raises ``PlanError`` if there is no lower plan."""
        owner, before = self._owner, entry.plan
        most = min(room + left_bytes, int((1 - _LEAST_LOWERED) * before.peak_bytes))
        most = min(most, owner.settings.most_bytes or most)  # set earlier by a program with a higher minimum
        settings = dataclasses.replace(owner.settings, most_bytes=most)
        plan = lowered_plan(entry.program, settings, before)
        if plan.peak_bytes >= before.peak_bytes:
            raise PlanError("its plan takes the least that is known to be possible")
        owner.settings, entry.most_bytes = settings, most
        owner.begin_anew()
        self._put(entry, plan)
        if left_bytes and plan.peak_bytes > room:
            now = lowered_plan(entry.program, dataclasses.replace(settings, most_bytes=room), plan)
            return lowered_by(entry.program, now, entry.arena)
        return entry.lowered

    def _put(self, entry: Entry, plan: Plan) -> None:
        entry.plan, entry.lowered = plan, lowered_by(entry.program, plan, entry.arena)
        _LOG.info(
            "planned %s within a lower budget: peak %d bytes of %d",
            entry.plan.graph.name,
            plan.peak_bytes,
            plan.budget_bytes,
        )
        self._owner.improve(entry)

    def _entry_of(self, program: Program) -> Entry | None:
        known = (entry for entries in self._owner.entries.values() for entry in entries)
        each = (one for entry in known for one in (entry, *entry.for_masks.values()))
        return next((entry for entry in each if entry.program is program), None)

    def _explain(self, error: Exception, call: RunningCall, plan: Plan, device: torch.device, why: str) -> None:
        """Add a note to the error that says what holds the memory."""
        try:
            held = "; ".join(map(str, holders(self._owner.model, device, call.inputs)))
        except MemoryError:
            held = "more than can be looked at, as no memory is left"
        error.add_note(
            f"lowtide: the pass does not run again: {why}. By its plan it takes {plan.peak_bytes} bytes "
            f"({format_bytes(plan.peak_bytes)}) on {device}, where beside it there are: {held}. Make the batch or the sequence "
            "smaller, or free what else is there."
        )


def ran_out(error: BaseException) -> bool:
    """Whether the error means that no memory is left, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _NONE_LEFT.search(str(error)) is not None


def _never(owner: Owner, program: Program) -> str | None:
    """Why passes of this program can never be rerun by a lower plan, or ``None``."""
    if owner.shares_budget or any(map(is_sharded, owner.model.modules())):
        return "it shares its budget with others of the same step"
    if several_processes():
        return "other processes run by the same plan"
    if any(
        op.effect and program.calls[op.id].target not in _OURS and op.target not in (OPTIMIZER_TARGET, *STATE_TARGETS)
        for op in program.graph.ops
    ):
        return "an operator in it has an effect that cannot be undone"
    return None


def _room(call: RunningCall, error: Exception, device: torch.device, peak_bytes: int) -> int:
    """Free what the pass held, and return this and what was free beside it: the bytes that the pass could have had."""
    asked, free = _asked_bytes(error, device), free_memory(device) or 0
    if asked is None or free >= asked:  # a limit unknown to the device, or fragmented memory
        free = 0
    before = allocated_bytes(device)
    call.let_go()
    traceback.clear_frames(error.__traceback__)
    after = allocated_bytes(device)
    interface_of(device).release_cached()
    if before is not None and after is not None and before > after:
        return before - after + free
    return peak_bytes - max((asked or 0) - free, int(_UNKNOWN_LOWERED * peak_bytes))


def _asked_bytes(error: Exception, device: torch.device) -> int | None:
    """The size of the allocation that failed, if the error says it."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    asked = int(float(found[1]) * BYTE_UNITS[found[2].replace("bytes", "B")])
    return None if asked > (device_memory(device) or asked) else asked


def _bytes(lowered: Lowered, term: Term) -> int:
    """The size of a gradient in bytes."""
    if term not in lowered.terms:
        return 0
    _, value = lowered.program.gradients[lowered.terms.index(term)]
    return lowered.program.metas[value].storage_bytes


def _with_budget(plan: Plan, most_bytes: int) -> Plan:
    """The plan, which fits into ``most_bytes``, with a budget of at most that."""
    if plan.budget_bytes <= most_bytes:
        return plan
    given = plan.lowered_from_bytes or plan.budget_bytes
    return dataclasses.replace(plan, budget_bytes=most_bytes, lowered_from_bytes=given)
