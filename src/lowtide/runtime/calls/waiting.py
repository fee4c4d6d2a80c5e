"""Calls of a model that wait for their backward pass at the same time.

If a tensor is used several times, the autograd engine adds its gradients one by one, in an order given by the uses,
across calls. This order decides the last bit. So if several calls wait for one backward pass, each has to return its
gradients as terms, not sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from lowtide.runtime.calls.call import ModelCall, call_of

_LOG = logging.getLogger(__name__)


class WaitingCalls:
    """The waiting calls of one model, whose budget is for ``in_flight`` of them. ``summed``: calls return sums after
    all, because programs with terms do not fit the budget."""

    def __init__(self, name: str, in_flight: int) -> None:
        self.summed = False
        self._name, self._in_flight = name, in_flight
        self._calls = weakref.WeakSet[ModelCall]()
        self._said = False

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        """A call returned these forward outputs. Warn once if more calls wait than were planned for."""
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
        """Another call begins: let waiting calls that return sums run again with terms. Returns whether there are
        any."""
        found = [call for call in self._calls if call.generator is not None and call.lowered.program.sums]
        for call in found:
            call.supersede()
        return bool(found)

    def leave_summed(self, why: Exception) -> None:
        """Let waiting calls return sums after all, with a warning."""
        _LOG.warning(
            "calls of %s that wait together hand over sums of gradients, which may differ from eager's in their last bit: "
            "their terms do not fit the budget (%s)",
            self._name, why,
        )  # fmt: skip
        self.summed = True
        for call in self._calls:
            call.superseded = False
