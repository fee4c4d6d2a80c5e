"""How to plan a model: the arguments of ``lowtide.rematerialize``, checked."""

from __future__ import annotations

import numbers
from dataclasses import dataclass

from lowtide.budget import is_percentage, parse_budget, parse_reserve
from lowtide.errors import PlanError
from lowtide.ir.costs import check_second_memory
from lowtide.solve import check_seed, get_planner
from lowtide.solve.auto import Auto

_CHOICES: dict[str, tuple[object, ...]] = {
    "compiler": ("eager", "inductor"),
    "on_new_signature": ("plan", "eager", "error"),
    "on_capture_error": ("parts", "error", "online"),
    "planning": ("wait", "background"),
    "dynamic": (None, True, False),
    "arena": (True, False),
    "rescue": (True, False),
    "chunked_loss": (True, False),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """How to plan a model; the arguments of ``lowtide.rematerialize``."""

    budget: int | str | None = None
    total_budget: int | str | None = None
    reserve: int | str = 0
    planner: str = "auto"
    compiler: str = "eager"
    on_new_signature: str = "plan"
    on_capture_error: str = "error"
    seed: int = 0
    planning: str = "wait"
    dynamic: bool | None = False
    max_programs: int = 64
    arena: bool = False
    offload: str | None = None
    offload_budget: int | str | None = None
    rescue: bool = True
    chunked_loss: bool = False
    agreed: bool = True  # one of several processes plans for all
    optimizer_bytes: int | None = None  # bytes of the optimizer's states, if known
    moved_bytes: int = 0  # of these, bytes in the second memory between updates
    in_flight: int = 1  # calls that wait for their backward pass at once
    beside_bytes: int | None = None  # with a budget shared by stages: bytes held by waiting calls
    between_bytes: int = 0  # of the budget, for the rest of the model between this part's passes
    most_bytes: int | None = None  # for a pass, after a step ran out of memory (``runtime.programs.rescue``)

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.total_budget is None):
            raise PlanError(
                'give either budget= (what a pass allocates) or total_budget= (everything), e.g. budget="8GiB".'
            )
        for name, choices in _CHOICES.items():
            given = getattr(self, name)
            if given not in choices:
                *others, last = (f'"{one}"' if isinstance(one, str) else repr(one) for one in choices)
                raise PlanError(f"{name}={given!r} is unknown; use {', '.join(others)} or {last}.")
        for name in ("max_programs", "in_flight"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, numbers.Integral) or given < 1:
                raise PlanError(f"{name}={given!r} must be an integer of 1 or more.")
        if self.on_capture_error == "online" and (self.budget is None or is_percentage(self.budget)):
            raise PlanError(
                'on_capture_error="online" needs budget= in bytes, such as "8GiB": what cannot be captured has no peak known '
                "beforehand that a percentage could be of."
            )
        self._check_offload()
        if self.in_flight > 1:
            self._check_in_flight()
        parse_budget(self.given, 1 << 40)  # raise for a malformed budget now, not at the first call
        parse_reserve(self.reserve, 1 << 40)
        get_planner(self.planner)
        check_seed(self.seed)

    def _check_in_flight(self) -> None:
        """Raise ``PlanError`` for options that change plans without accounting for other calls at once."""
        wrong = {
            'planning="background"': self.planning == "background",
            'on_capture_error="parts"': self.on_capture_error == "parts",
            'on_capture_error="online"': self.on_capture_error == "online",
            "rescue=True": self.rescue,
            "arena=True": self.arena,
            "offload=": self.offload is not None,
        }
        for name, given in wrong.items():
            if given:
                raise PlanError(f"in_flight={self.in_flight} does not go with {name}.")

    def _check_offload(self) -> None:
        if self.offload is None:
            if self.offload_budget is not None:
                raise PlanError('offload_budget= needs offload=, such as offload="disk".')
            return
        check_second_memory(self.offload)
        if self.arena:
            raise PlanError("arena=True has no addresses for what comes back from offload=; give one of them.")
        if self.offload_budget is not None:
            parse_budget(self.offload_budget, 1 << 40, what="offload_budget")

    @property
    def waits(self) -> bool:
        """Whether other calls run between the two passes of a call, within the same budget."""
        return self.in_flight > 1 or self.beside_bytes is not None

    @property
    def adapts(self) -> bool:
        """Whether a call with new sizes starts at once, from what is known of other sizes; compiled kernels are for one
        size each."""
        return self.planning == "background" and self.compiler == "eager"

    @property
    def given(self) -> int | str:
        """The one budget that was given."""
        given = self.budget if self.budget is not None else self.total_budget
        assert given is not None
        return given


def searches(planner: str) -> bool:
    """Whether a planner continues to search after a first plan."""
    chosen = get_planner(planner)
    return isinstance(chosen, Auto) and chosen.effort > 1
