"""Run a model that is no single program in parts: each largest submodule that can be captured runs by its own plan.

The model's own code runs as it is. Every submodule that it calls is tried. If it can be captured, it is a part. If not,
its own code runs too, and the submodules inside it are tried. So decisions that depend on data lie in code between
parts, which runs once and is never recomputed. All parts share one budget with the memory of the code between them, see
``parts.shared``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from lowtide.budget import is_percentage
from lowtide.capture.python_state.paths import named
from lowtide.errors import CaptureError
from lowtide.program.distributed.sharded import is_sharded
from lowtide.program.sizes import outside_of_model
from lowtide.runtime.parts.beginning import Beginning
from lowtide.runtime.parts.eager_steps import EagerSteps
from lowtide.runtime.parts.part import PartsInPlace
from lowtide.runtime.parts.shared import SharedBudget
from lowtide.runtime.parts.submodules import can_run_in_parts
from lowtide.settings import Settings

_LOG = logging.getLogger(__name__)


class Parts(PartsInPlace):
    """The parts of one model, which share one budget. ``why``: why the model as a whole cannot be captured; raised if
    it is sharded."""

    def __init__(self, model: nn.Module, settings: Settings, why: CaptureError) -> None:
        if any(map(is_sharded, model.modules())):
            raise why
        # Processes may run different parts, so none may wait for another's plan. Arenas of several parts would add up.
        super().__init__(model, SharedBudget(dataclasses.replace(settings, agreed=False, arena=False), "parts"))
        if settings.total_budget is not None:
            self.shared.budget.outside = outside_of_model(model, settings.optimizer_bytes)
        self.shared.give_way, self.shared.expected = self._run_more_again, self._with_siblings
        self.why, self.selects = str(why), why.selects
        self.beginning = Beginning(model)
        self._eager = EagerSteps(self.shared, self._trained_bytes)
        self._has_any = can_run_in_parts(model)
        self._steps = 0
        self._is_hopeless = False  # plans do not fit, even with recomputed submodules
        self._is_unplanned = False  # nothing can be planned or kept within the budget
        changed = ", without an arena" * settings.arena
        changed += ", with a loss in pieces where one computes all of it" * settings.chunked_loss
        what = "%s cannot be one program, so its submodules are planned%s, and code between them runs as it is: %s"
        if self._has_any:
            _LOG.warning(what, type(model).__name__, changed, self.why)

    def _run_more_again(self, missing_bytes: int) -> bool:
        """Plans alone do not fit: let more submodules run again. Returns whether the next step will differ, because of
        these, because the model goes online, or because it runs without a plan (as the log said)."""
        chosen = self.watch.to_run_again(missing_bytes)
        for part in self._parts.values():
            part.runs_again = part.runs_again or part.name in chosen
        if chosen:
            what = "plans alone do not meet the budget: from the next step on, %s run again in the backward pass"
            _LOG.warning(what, named(chosen))
        is_seen = self._eager.are_its_own and self._eager.peak_bytes > 0
        self._is_hopeless = is_seen and not (chosen or self.shared.ran or self.backward.may_be)
        self._eager.peak_bytes *= not chosen  # later steps differ from those measured
        return bool(chosen) or self._is_hopeless or self._is_unplanned

    @property
    def are_none(self) -> bool:
        """Whether submodules were tried in a step and none runs by a plan."""
        return self._has_any and self._steps > 0 and not (self._calls or self.shared.unlike or self.planned())

    def online_bytes(self, arguments: Any) -> int | None:
        """The budget under which to run the model online, or ``None``. Online mode is for a model of which nothing can
        be planned, whose steps contain nothing else, and which exceeds the budget. A budget in percent refers to the
        largest step, which is measured without a budget first. A budget in bytes applies at once if there is no
        submodule to try."""
        if self._calls:
            return None
        peak_bytes, at_once = self._eager.peak_bytes, not (self._has_any or is_percentage(self.shared.settings.given))
        self.shared.grows = self._eager.given(arguments) and is_percentage(self.shared.settings.given)
        if self.shared.grows or (self.planned() and not self._is_hopeless):
            return None
        tried = not self._has_any or self._is_hopeless or (self.are_none and not self.watch.calls)
        if not (tried and not self.backward.may_be and self._eager.are_its_own and (peak_bytes or at_once)):
            return None
        budget_bytes = self.shared.budget.of_plain(peak_bytes)
        return budget_bytes if peak_bytes > budget_bytes or at_once else None

    def _trained_bytes(self) -> int:
        return sum(one.nbytes for one in self.model.parameters() if one.requires_grad)

    def are_outgrown(self, arguments: Any) -> bool:
        """Whether a budget in percent has to grow, because arguments or trained parameters are larger than in the steps
        measured."""
        return is_percentage(self.shared.settings.given) and self._eager.are_outgrown(arguments)

    def ran(self, result: Any) -> None:
        self.shared.budget.fixed = not self._eager.grew and any(part.runs_again for part in self._parts.values())
        self._eager.returned(result)
        self.backward.returned(result)

    def outside(self) -> dict[str, str]:
        """Names of submodules that are not parts, with the reason."""
        return {part.name: part.outside for part in self._parts.values() if part.outside}

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """A context for a call of the model, in which submodules run as parts where possible."""
        if self._calls:  # the model calls itself
            yield
            return
        self.backward.leave()
        self._steps += not self.shared.unlike  # a step in which parts ran without plans does not count
        known = self._steps == 1 + self._has_any  # enough steps ran to know what can be planned
        self._is_unplanned = (known or self._is_unplanned) and not (self.planned() or self._eager.are_its_own)
        if known and self._is_unplanned:
            _LOG.warning(
                "%s runs without a plan, whatever the budget: nothing of it can be planned. lowtide.online takes any program, "
                "with all of a step inside: %s",
                type(self.model).__name__, self.why,
            )  # fmt: skip
        self._eager.begin(self.device)
        self.casts.begin()
        self._calls += 1
        try:
            with self.shared.call(self.device), self._standing():
                yield
            self.watch.end()
            self.shared.postponed = self._steps == 1 and any(part.may_change for part in self.planned())
        finally:
            self._calls -= 1
