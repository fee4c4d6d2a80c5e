"""Run a model whose programs are not reused under ``lowtide.online``, instead of planning each call.

For a model that unrolls a loop, a capture takes many times as long as a step. If most calls would need one, online mode
is the quicker way to keep a budget. If its first steps show that it is not, the model is captured in every call after
all.
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
_TRIED = 4  # steps before captures may be found quicker


class OnlineInstead:
    """Decides this for one model. ``budget_bytes``: the most that a planned call was given, once online mode takes
    over."""

    def __init__(self, settings: Settings) -> None:
        plain = (
            settings.compiler == "eager" and settings.offload is None and not (settings.chunked_loss or settings.arena)
        )
        self._may_be = plain and settings.on_capture_error == "parts"
        self._grows = is_percentage(settings.given)
        self._largest_bytes = 0  # largest arguments of planned calls
        self._passes: int | None = None  # planned forward passes up to the latest call
        self._parts: CurrentStep | None = None  # the model's parts, if some ran in that call
        self._parts_passes = 0  # the share of these parts in ``_passes``
        self._are_its_own = True
        self._seconds = 0.0  # duration of a call with its capture
        self.budget_bytes, self.device = 0, torch.device("cpu")

    def watch(self, inputs: Sequence[torch.Tensor], states: int) -> None:
        """A call with these flat inputs may run by a plan. The first ``states`` are the model's."""
        self._largest_bytes = max(self._largest_bytes, strided_bytes(inputs[states:]))
        if self._passes is not None:
            backward = 0 if self._parts is None else self._parts.passes - self._parts_passes  # of called submodules
            self._are_its_own &= ModelCall.begun == self._passes + backward

    def called(self, parts: CurrentStep | None = None) -> None:
        """The call has ended. ``parts``: set if it ran in parts."""
        self._passes, self._parts, self._parts_passes = ModelCall.begun, parts, 0 if parts is None else parts.passes

    def takes_over(self, budget_bytes: int, seconds: float, device: torch.device) -> None:
        """Online mode takes over from planned calls, which got ``budget_bytes`` and took ``seconds`` each."""
        self.budget_bytes, self._seconds, self.device = budget_bytes, seconds, device
        self._may_be &= budget_bytes > 0

    def is_possible(self, arguments: Any) -> bool:
        """Whether the steps contain only this model: no other model ran by plans, none computed the arguments, and no
        other process waits for its plans."""
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
        """Begin online mode for the model ``name``, and log it. ``why``: the reason, or the error that its parts
        raised."""
        what = "would be captured in most calls" if self.budget_bytes else "cannot be captured"
        within = format_bytes(budget_bytes)
        unmet = why if isinstance(why, InfeasibleBudgetError) else None
        reason = why if unmet is None else f"its parts do not fit: {unmet}"
        _LOG.warning("%s %s, so it runs under lowtide.online within %s: %s", name, what, within, reason)
        return OnlineCalls(budget_bytes, device, may_exceed, None if may_exceed else unmet, once_met=self._grows)

    def calls(self, online: OnlineCalls, name: str, budget_bytes: int, outgrown: bool) -> OnlineCalls | None:
        """What later calls of the model ``name`` run under, after the latest ran ``online``. ``budget_bytes``: what
        planned calls got since. Returns ``None`` if captures are quicker or the budget is ``outgrown``."""
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
        """Whether a call is larger than all planned ones, so that a budget in percent has to grow with it."""
        larger = self._grows and self.budget_bytes > 0
        return larger and strided_bytes(structure.flatten(arguments)[0]) > self._largest_bytes
