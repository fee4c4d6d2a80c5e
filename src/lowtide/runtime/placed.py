"""Programs whose tensors have their places in the arena of their model."""

from __future__ import annotations

import logging

from lowtide.lower import Addresses, Lowered, lower
from lowtide.memory.arena import Arena
from lowtide.planning import Plan
from lowtide.program import Program
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)


def lowered(program: Program, plan: Plan, arena: Arena | None) -> Lowered:
    """``program`` by the schedule of ``plan``, in ``arena``, if there is one. Where the addresses do not fit the budget, or
    there is no memory for a block so large, it runs outside, which the log says."""
    if arena is None:
        return lower(program, plan.schedule)
    layout = plan.layout
    why = ""
    if layout.reserved_bytes > plan.budget_bytes:
        why = f"its addresses take up {layout.reserved_bytes} bytes, more than the budget of {plan.budget_bytes}"
    elif not arena.reserve(layout.block_bytes):
        why = f"a block of {layout.block_bytes} bytes ({format_bytes(layout.block_bytes)}) cannot be reserved"
    if why:
        _LOG.warning("%s: it runs without an arena, its tensors where the allocator puts them", why)
        return lower(program, plan.schedule)
    return lower(program, plan.schedule, Addresses.of(layout, arena))
