"""Calls of a model that wait for one backward pass together.

The autograd engine adds the gradients of a tensor that is used several times one after the other, in the order of the uses,
whichever calls they lie in. The order decides the last bit, so where several calls wait, each has to hand over the terms of its
sums.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

import torch

from lowtide.program import Program
from lowtide.runtime.calls.call import ModelCall, call_of

_LOG = logging.getLogger(__name__)


class CallsAtOnce:
    """How many calls of a model wait for their backward pass: a budget is for ``in_flight`` of them."""

    def __init__(self, name: str, in_flight: int) -> None:
        self._name, self._in_flight = name, in_flight
        self._calls: weakref.WeakSet[ModelCall] | None = weakref.WeakSet()

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        """A call returned these forward outputs. Says once where more wait than were planned for."""
        call = None if self._calls is None else call_of(outputs)
        if call is None or self._calls is None:
            return
        self._calls.add(call)
        if len(self._calls) <= self._in_flight:
            return
        waiting = sum(each.generator is not None for each in self._calls)
        if waiting > self._in_flight:
            self._calls = None
            _LOG.warning(
                "%d calls of %s wait for their backward pass at once, and its budget is for %d: what the others hold comes on "
                "top. Give lowtide.rematerialize in_flight=%d or what it comes to (micro-batches of a pipeline, say), or run "
                "each backward pass before the next call.",
                waiting, self._name, self._in_flight, waiting,
            )  # fmt: skip


class WaitingCalls:
    """Those by programs with sums of gradients. ``summed``: what waits together hands over sums after all, since programs with
    their terms do not fit the budget."""

    def __init__(self) -> None:
        self.summed = False
        self._calls = weakref.WeakSet[ModelCall]()
        self._superseded: list[weakref.ref[ModelCall]] = []

    def add(self, program: Program, outputs: Sequence[torch.Tensor]) -> None:
        """A call returned these forward outputs."""
        call = call_of(outputs) if program.sums and not self.summed else None
        if call is not None:
            self._calls.add(call)

    def supersede(self) -> bool:
        """Another call begins: whether there are any that wait, which are to run again in terms."""
        found = [call for call in self._calls if call.generator is not None]
        for call in found:
            call.superseded = True
        self._calls.clear()
        self._superseded = [weakref.ref(call) for call in found]
        return bool(found)

    def leave_summed(self) -> None:
        """They run as they began after all."""
        self.summed = True
        for call in filter(None, (one() for one in self._superseded)):
            call.superseded = False
