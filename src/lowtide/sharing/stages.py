"""Several stages of a pipeline that one rank holds, inside one budget.

A rank runs the passes of its stages in the order of its schedule. While one runs, the micro-batches of all of them that are in
flight hold what they save, and parameters hold the gradients that earlier ones left. Every micro-batch runs through every
stage of a rank, so the pipeline waits for the sum of their times, which is what ``sharing.choose`` makes small. Ranks have a
memory each, so none can give another any of it: the slowest one is as quick as possible when each of them is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lowtide.program.distributed.gathers import unreduced_bytes
from lowtide.sharing.assignment import Share
from lowtide.sharing.constraints import Constraint, Footprint, Member, rooms

Pass = tuple[int, bool]  # of which stage, by its number on the rank, and whether it is a backward pass


def most_in_flight(order: Sequence[Pass]) -> dict[int, int]:
    """By stage, how many of its micro-batches wait for their backward pass at most, the one that runs included."""
    waiting, most = Counter[int](), dict[int, int]()
    for stage, backward in order:
        waiting[stage] += -1 if backward else 1
        most[stage] = max(most.get(stage, 0), waiting[stage])
    return most


def stage_constraints(order: Sequence[Pass], left_bytes: Sequence[int]) -> list[Constraint]:
    """Of the passes in this ``order``. ``left_bytes``: by stage, what a backward pass leaves in its parameters."""
    waiting, left = Counter[int](), set[int]()
    found: dict[Constraint, None] = {}
    for stage, backward in order:
        if backward:
            waiting[stage] -= 1
        saved = tuple(sorted(waiting.elements()))
        found[Constraint(sum(left_bytes[one] for one in left), stage, backward, saved)] = None
        if backward:
            left.add(stage)
        else:
            waiting[stage] += 1
    return list(found)


def left_bytes(member: Member) -> int:
    """Of the gradients that a call leaves in parameters."""
    program, costs = member.program, member.costs
    values = program.graph.values
    storages = {values[value].storage for position, value in program.gradients if position < program.parameters}
    return sum(int(costs.storage_bytes[storage]) for storage in storages) + unreduced_bytes(program)


def stage_shares(
    members: Sequence[Member], constraints: Sequence[Constraint], taken: Sequence[Footprint], budget_bytes: int
) -> list[Share]:
    """What each stage may take while it runs, and save, so that plans within the shares are within the budget together: what
    the ``taken`` footprints leave."""
    left = rooms(constraints, [own.saved_bytes for own in taken], budget_bytes)
    return [
        Share(room, max(room - own.saved_bytes - member.arriving_bytes, 0))
        for room, own, member in zip(left, taken, members, strict=True)
    ]
