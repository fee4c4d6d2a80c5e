"""Programs whose tensors have their places: in the arena of their model, or for a while in a second memory."""

from __future__ import annotations

import functools
import logging

from lowtide.lower import Addresses, Lowered, lower
from lowtide.memory.arena import Arena
from lowtide.offload import open_memory, room_for
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.program.sizes import program_device
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)


def lowered(program: Program, plan: Plan, arena: Arena | None) -> Lowered:
    """``program`` by the schedule of ``plan``, in ``arena``, if there is one. Where the addresses do not fit the budget it
    runs without, which the log says."""
    memory, beside, device = plan.costs.second_memory, plan.costs.collectives_beside, program_device(program)
    if plan.schedule.moves and memory is not None:
        opened = functools.partial(open_memory, memory.name, device)
        return lower(program, plan.schedule, room=room_for(plan.schedule, plan.costs, opened), beside=beside)
    if arena is None:
        return lower(program, plan.schedule, beside=beside)
    layout = plan.layout
    if layout.reserved_bytes > plan.budget_bytes:
        _LOG.warning(
            "its addresses take up %d bytes (%s), more than the budget of %d: it runs without an arena",
            layout.reserved_bytes, format_bytes(layout.reserved_bytes), plan.budget_bytes,
        )  # fmt: skip
        return lower(program, plan.schedule, beside=beside)
    return lower(program, plan.schedule, Addresses.of(layout, arena, device), beside=beside)
