"""A model whose programs do not come again, under ``lowtide.online`` instead of by a plan for each call.

A capture takes many times as long as a step of a model that unrolls a loop. Where most calls would need one, the online mode is
the quicker way to hold a budget. Where it is not, which its first steps tell, the model is captured in every call all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from lowtide.budget import is_percentage
from lowtide.errors import InfeasibleBudgetError
from lowtide.objects import structure
from lowtide.program.sizes import strided_bytes
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.online_calls import OnlineCalls
from lowtide.runtime.parts.current_step import CurrentStep
from lowtide.settings import Settings
from lowtide.sharing.agreement import several_processes
from lowtide.units import format_bytes

_LOG = logging.getLogger(__name__)
_TRIED = 4  # steps


class OnlineInstead:
    """What is known of a model for that. ``budget_bytes``: the most that a call by a plan was given, once it is to be so."""

    def __init__(self, settings: Settings) -> None:
        plain = (
            settings.compiler == "eager" and settings.offload is None and not (settings.chunked_loss or settings.arena)
        )
        self._may_be = plain and settings.on_capture_error == "parts"
        self._grows = is_percentage(settings.given)
        self._largest_bytes = 0  # of the arguments of calls by plans
        self._passes: int | None = None  # by plans, when the latest call had been made
        self._parts: CurrentStep | None = None  # of the model, some of which ran in it
        self._parts_passes = 0  # by plans of these, of those
        self._are_its_own = True
        self._seconds = 0.0  # of a call that is captured
        self.budget_bytes, self.device = 0, torch.device("cpu")

    def watch(self, inputs: Sequence[torch.Tensor], states: int) -> None:
        """A call with these flat inputs may run by a plan, the first ``states`` of which are the model's."""
        self._largest_bytes = max(self._largest_bytes, strided_bytes(inputs[states:]))
        if self._passes is not None:
            backward = 0 if self._parts is None else self._parts.passes - self._parts_passes  # which called submodules
            self._are_its_own &= ModelCall.begun == self._passes + backward

    def called(self, parts: CurrentStep | None = None) -> None:
        """The call has been made, by plans of these ``parts`` where it is in parts."""
        self._passes, self._parts, self._parts_passes = ModelCall.begun, parts, 0 if parts is None else parts.passes

    def takes_over(self, budget_bytes: int, seconds: float, device: torch.device) -> None:
        """From calls by plans, which were given and took as much, on this device."""
        self.budget_bytes, self._seconds, self.device = budget_bytes, seconds, device
        self._may_be &= budget_bytes > 0

    def is_possible(self, arguments: Any) -> bool:
        """Whether the steps of the model are its own: no other model ran by plans, none comes before it, and no other process
        waits for its plans."""
        if not (self._may_be and self._are_its_own) or several_processes():
            return False
        return all(one.grad_fn is None for one in structure.flatten(arguments)[0])

    def begun(
        self,
        name: str,
        why: str | InfeasibleBudgetError,
        budget_bytes: int,
        device: torch.device,
        may_exceed: bool,
    ) -> OnlineCalls:
        """By what the calls of the model of that name run from now on, which the log says. ``why``: of parts, their error."""
        what = "would be captured in most calls" if self.budget_bytes else "cannot be captured"
        within = format_bytes(budget_bytes)
        unmet = why if isinstance(why, InfeasibleBudgetError) else None
        reason = why if unmet is None else f"its parts do not fit: {unmet}"
        _LOG.warning("%s %s, so it runs under lowtide.online within %s: %s", name, what, within, reason)
        return OnlineCalls(budget_bytes, device, may_exceed, None if may_exceed else unmet, once_met=self._grows)

    def calls(self, online: OnlineCalls, name: str, budget_bytes: int, outgrown: bool) -> OnlineCalls | None:
        """By what later calls of the model of that name run, where the latest ran ``online`` and one by a plan was given so
        many bytes since; ``None`` where captures are quicker, or they are ``outgrown``."""
        tried = self.budget_bytes > 0 and len(online.step_seconds) >= _TRIED
        slower = tried and min(online.step_seconds) > self._seconds
        if not (slower or outgrown or 0 < self.budget_bytes < budget_bytes):
            return online
        online.leave()
        if outgrown:
            return None
        if slower:
            _LOG.warning("%s is captured in every call: lowtide.online takes longer", name)
        self.budget_bytes = max(budget_bytes, self.budget_bytes)
        return None if slower else OnlineCalls(self.budget_bytes, self.device, may_exceed=True)

    def wants_plan(self, arguments: Any) -> bool:
        """Whether a call is larger than all that were planned, so that a budget in percent has to grow with it."""
        larger = self._grows and self.budget_bytes > 0
        return larger and strided_bytes(structure.flatten(arguments)[0]) > self._largest_bytes
