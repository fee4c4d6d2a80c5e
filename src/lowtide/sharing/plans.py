"""Plans of programs that share a budget, by what they were made for: a search for shares asks for many that are alike."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lowtide.errors import InfeasibleBudgetError
from lowtide.sharing.assignment import Assignment, Share

_MOST = 64  # of a program, that are kept
_NEAR = 64  # a plan for this part of a room less is taken for one for all of it


@dataclasses.dataclass(slots=True)
class KnownPlans:
    """Of one program: assignments, each with the room and the limit of saved bytes that it was ``made`` for; shares for which
    there is no plan, and what is near (``unmet``); bytes that it needs while it runs, whatever it saves (``least_bytes``), and
    bytes that do where it saves what it likes (``met_bytes``)."""

    made: list[tuple[int, int, Assignment]] = dataclasses.field(default_factory=list)
    unmet: list[tuple[Share, InfeasibleBudgetError]] = dataclasses.field(default_factory=list)
    least_bytes: int = 0
    met_bytes: float = math.inf

    def made_for(self, room: int, limit: int) -> Assignment | None:
        """What was made for this, or for more where it does with this."""
        for asked, allowed, one in self.made:
            saves = limit == allowed or one.footprint.saved_bytes <= limit <= allowed
            if saves and one.footprint.running_bytes <= room <= asked + asked // _NEAR:
                return one
        return None

    def add(self, room: int, limit: int, found: Assignment) -> None:
        self.made.append((room, limit, found))
        del self.made[:-_MOST]

    def check(self, share: Share) -> None:
        """Raises ``InfeasibleBudgetError`` where there was no plan for a share that gave no less."""
        for other, error in self.unmet:
            if _is_within(share, error.minimum_bytes - 1, other.between_bytes):
                more = max(share.between_bytes - other.between_bytes, 0)
                raise dataclasses.replace(error, minimum_bytes=error.minimum_bytes + more)

    def failed(self, share: Share, error: InfeasibleBudgetError) -> None:
        self.unmet.append((share, dataclasses.replace(error)))  # alone: its traceback holds whatever is there
        del self.unmet[:-_MOST]


class Plans:
    """Those of several programs, by their keys. They can be kept from one search for shares to the next. ``tried``: how many
    the present search has asked for, of at ``most`` so many once that is known."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPlans] = {}
        self.begin()

    def begin(self) -> None:
        """Another search begins."""
        self.tried = 0
        self.most: int | None = None

    def of(self, program: str) -> KnownPlans:
        return self._known.setdefault(program, KnownPlans())

    def keep(self, programs: Iterable[str]) -> None:
        """Those of these programs alone."""
        self._known = {program: self.of(program) for program in programs}


def _is_within(share: Share, budget_bytes: int, between_bytes: int) -> bool:
    """Whether a share gives no more than these, neither while the program runs nor while it waits."""
    waiting_bytes = share.budget_bytes - share.between_bytes
    return share.budget_bytes <= budget_bytes and waiting_bytes <= budget_bytes - between_bytes
