"""Calls of a model that wait for one backward pass together.

The autograd engine adds the gradients of a tensor that is used several times one after the other, in the order of the uses,
whichever calls they lie in. The order decides the last bit, so where several calls wait, each has to hand over the terms of its
sums.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from lowtide.program import Program
from lowtide.runtime.calls.call import ModelCall, call_of


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
