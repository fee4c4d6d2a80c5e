"""Passes that run out of memory though they keep to their plan: other processes, or tensors that no plan knows of, take it.

What the pass held is dropped; that and what was free beside it is the budget from now on, for all programs of the model. The
pass runs again from its start by a plan within it, and draws the same random numbers. In the forward pass nothing has left by
then: buffers are written last. In the backward pass the forward program runs first, and writes nothing; gradients that had left
are equal to the bit, and are dropped (``calls.call``).

What cannot be put back (an input that is written at once, ``capture.convert.updates``) is never tried: an error comes
through with a note that says why, and so does that of the third step in a row.
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
_MOST_IN_A_ROW = 3  # steps that run out, of which the last does not run again
_LEAST_LOWERED = 0.03  # of what the pass took; twice as much each further time in a step, as the estimate is wrong then
_UNKNOWN_LOWERED = 0.1  # where nobody tells how much was missing
# Where no error of PyTorch's own says so: its allocator on the CPU, and libraries of kernels that allocate themselves.
_NONE_LEFT = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|CUDA error: out of memory"
    r"|(?i:unable to find an engine to execute)"
)
_ASKED = re.compile(r"[tT]ried to allocate (\d+\.?\d*) ([KMGT]iB|bytes)")
_ADVICE = "Lower budget= by what is missing, make the batch smaller, or free what else is allocated."
_OURS = (targets.update, targets.keep_value, targets.tangent, targets.expect)  # effects that are known

Term = tuple[int, int]


class RunningCall(Protocol):
    """A call whose pass has failed. ``rescues``: how often one has before."""

    inputs: list[torch.Tensor]
    rescues: int

    def let_go(self) -> None: ...


class Rescue:
    """For the calls of ``owner``. ``in_a_row``: steps that ran out since one came to its end without."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.in_a_row = 0

    def watch(self, entry: Entry) -> None:
        """Have the allocator's level counted from before the first pass of ``entry`` on."""
        if self._owner.settings.rescue and not self._owner.shares_budget:
            allocated_bytes(program_device(entry.program))

    def ended(self, call: RunningCall) -> None:
        """The backward pass of ``call`` has come to its end."""
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
        """What a pass of ``call`` by ``lowered``, which ended in ``error``, is to run by from its start; ``None`` where that
        cannot be, with a note in the error, unless memory is not what it is about. ``reason`` why it cannot be, if the caller
        knows one; ``left``: the gradients that a backward pass has handed out, as terms."""
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
        """The entry, by another plan where the budget was lowered since it was planned and there is a lower one."""
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
        """Lower the budget to ``room``, and what gradients hold that had left, which are not there when a pass begins. Raises
        ``PlanError`` where there is no lower plan."""
        owner, before = self._owner, entry.plan
        most = min(room + left_bytes, int((1 - _LEAST_LOWERED) * before.peak_bytes))
        most = min(most, owner.settings.most_bytes or most)  # of a program that cannot do with so little
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
        """Say in the error what took the memory."""
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
    """Whether the error says that there is no memory left, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _NONE_LEFT.search(str(error)) is not None


def _never(owner: Owner, program: Program) -> str | None:
    """Why no pass of the program can run again by a lower plan."""
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
    """What the pass has held, of which it lets go, and what was free beside it: the bytes that it could have had."""
    asked, free = _asked_bytes(error, device), free_memory(device) or 0
    if asked is None or free >= asked:  # a limit that the device knows nothing of, or memory in pieces
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
    """What the allocation that failed was for, where the error tells it."""
    found = _ASKED.search(str(error))
    if found is None:
        return None
    asked = int(float(found[1]) * BYTE_UNITS[found[2].replace("bytes", "B")])
    return None if asked > (device_memory(device) or asked) else asked


def _bytes(lowered: Lowered, term: Term) -> int:
    """Of a gradient."""
    if term not in lowered.terms:
        return 0
    _, value = lowered.program.gradients[lowered.terms.index(term)]
    return lowered.program.metas[value].storage_bytes


def _with_budget(plan: Plan, most_bytes: int) -> Plan:
    """The plan, which fits into ``most_bytes``, for no more than these."""
    if plan.budget_bytes <= most_bytes:
        return plan
    given = plan.lowered_from_bytes or plan.budget_bytes
    return dataclasses.replace(plan, budget_bytes=most_bytes, lowered_from_bytes=given)
