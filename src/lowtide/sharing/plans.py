"""Known plans of programs that share a budget, by what they were made for: a search for shares asks for many similar
ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from lowtide.errors import InfeasibleBudgetError
from lowtide.sharing.assignment import Assignment, Share

_MOST = 64  # plans kept per program
_NEAR = 64  # a plan made for up to 1/64 less room is reused


@dataclasses.dataclass(slots=True)
class KnownPlans:
    """The plans of one program. ``made``: assignments with the room and the limit of saved bytes they were made for.
    ``unmet``: shares without a plan, with their errors. ``least_bytes``: needed while it runs, whatever it saves.
    ``met_bytes``: sufficient while it runs if it may save anything."""

    made: list[tuple[int, int, Assignment]] = dataclasses.field(default_factory=list)
    unmet: list[tuple[Share, InfeasibleBudgetError]] = dataclasses.field(default_factory=list)
    least_bytes: int = 0
    met_bytes: float = math.inf

    def made_for(self, room: int, limit: int) -> Assignment | None:
        """A plan made for this room and limit, or for larger ones if it fits these too; else ``None``."""
        for asked, allowed, one in self.made:
            saves = limit == allowed or one.footprint.saved_bytes <= limit <= allowed
            if saves and one.footprint.running_bytes <= room <= asked + asked // _NEAR:
                return one
        return None

    def add(self, room: int, limit: int, found: Assignment) -> None:
        self.made.append((room, limit, found))
        del self.made[:-_MOST]

    def check(self, share: Share) -> None:
        """Raise ``InfeasibleBudgetError`` if there was no plan for a share at least as large."""
        for other, error in self.unmet:
            if _is_within(share, error.minimum_bytes - 1, other.between_bytes):
                more = max(share.between_bytes - other.between_bytes, 0)
                raise dataclasses.replace(error, minimum_bytes=error.minimum_bytes + more)

    def failed(self, share: Share, error: InfeasibleBudgetError) -> None:
        self.unmet.append((share, dataclasses.replace(error)))  # a copy: the error's traceback holds tensors
        del self.unmet[:-_MOST]


class Plans:
    """Known plans of several programs, by key; reusable from one search to the next. ``tried``: plans that the present
    search has made; ``most``: its limit, once known."""

    def __init__(self) -> None:
        self._known: dict[str, KnownPlans] = {}
        self.begin()

    def begin(self) -> None:
        """Begin another search."""
        self.tried = 0
        self.most: int | None = None

    def of(self, program: str) -> KnownPlans:
        return self._known.setdefault(program, KnownPlans())

    def keep(self, programs: Iterable[str]) -> None:
        """Forget the plans of all other programs."""
        self._known = {program: self.of(program) for program in programs}


def _is_within(share: Share, budget_bytes: int, between_bytes: int) -> bool:
    """Whether a share gives no more than these bytes, while the program runs and while it waits."""
    waiting_bytes = share.budget_bytes - share.between_bytes
    return share.budget_bytes <= budget_bytes and waiting_bytes <= budget_bytes - between_bytes
