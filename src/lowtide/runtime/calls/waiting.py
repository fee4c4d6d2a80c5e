"""Calls of a model that wait for their backward pass at once.

The autograd engine adds the gradients of a tensor that is used several times one after the other, in the order of the uses,
whichever calls they lie in. The order decides the last bit, so where several calls wait for one backward pass together, each
has to hand over the terms of its sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from lowtide.runtime.calls.call import ModelCall, call_of

_LOG = logging.getLogger(__name__)


class WaitingCalls:
    """Those of one model, whose budget is for ``in_flight`` of them. ``summed``: what waits together hands over sums after all,
    since programs with their terms do not fit the budget."""

    def __init__(self, name: str, in_flight: int) -> None:
        self.summed = False
        self._name, self._in_flight = name, in_flight
        self._calls = weakref.WeakSet[ModelCall]()
        self._said = False

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        """A call returned these forward outputs. Says once where more wait than were planned for."""
        call = call_of(outputs)
        if call is None:
            return
        self._calls.add(call)
        if self._said or len(self._calls) <= self._in_flight:
            return
        waiting = sum(each.generator is not None for each in self._calls)
        if waiting > self._in_flight:
            self._said = True
            _LOG.warning(
                "%d calls of %s wait for their backward pass at once, and its budget is for %d: what the others hold comes on "
                "top. Run each backward pass before the next call or, where each has a backward pass of its own (micro-batches "
                "of a pipeline), give lowtide.rematerialize in_flight=%d or what it comes to.",
                waiting, self._name, self._in_flight, waiting,
            )  # fmt: skip

    def supersede(self) -> bool:
        """Another call begins: whether there are any with sums of gradients that wait, which are to run again in terms."""
        found = [call for call in self._calls if call.generator is not None and call.lowered.program.sums]
        for call in found:
            call.supersede()
        return bool(found)

    def leave_summed(self, why: Exception) -> None:
        """They run as they began after all."""
        _LOG.warning(
            "calls of %s that wait together hand over sums of gradients, which may differ from eager's in their last bit: "
            "their terms do not fit the budget (%s)",
            self._name, why,
        )  # fmt: skip
        self.summed = True
        for call in self._calls:
            call.superseded = False
