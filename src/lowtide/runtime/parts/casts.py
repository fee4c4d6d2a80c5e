"""Parameters that autocast casts once for several parts.

Under autocast, a parameter that is used twice is cast once, and the gradients of the cast are added in low precision. A
plan does the same within a part (``capture.trace.autocast``), but each part makes its own cast. So if parts share a
parameter, or a part runs several times, their own code runs, with autocast's casts.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from lowtide.capture.model_state import named_modules
from lowtide.runtime.programs.recaptures import UnusualCallError

_LOG = logging.getLogger(__name__)


class KeptCasts:
    """Shared casts in the calls of one model."""

    def __init__(self) -> None:
        self._registered: Counter[int] | None = None  # number of occurrences by parameter id, if needed
        self._called = set[int]()  # ids of part modules run in this call of the model
        self._repeated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that run several times in a call

    def begin(self) -> None:
        """A call of the model begins."""
        self._registered = None
        self._called.clear()

    def refuse_shared(self, part: nn.Module, model: nn.Module, device: torch.device) -> None:
        """Raise ``UnusualCallError`` if ``part`` of ``model`` would use casts that other code uses too."""
        if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
            return
        if self._registered is None:
            self._registered = Counter(_parameters(model))
        if id(part) in self._called and part not in self._repeated:
            self._repeated.update(part.modules())
            _LOG.warning(
                "%s runs several times under autocast, which casts its parameters once for all of them: it runs as it is from "
                "now on, and the gradients of its parameters are close to eager's in this step",
                type(part).__name__,
            )
        self._called.add(id(part))
        own = Counter(_parameters(part))
        if part in self._repeated or any(count < self._registered[key] for key, count in own.items()):
            raise UnusualCallError("autocast casts its parameters once for it and for what else uses them")


def _parameters(module: nn.Module) -> Iterator[int]:
    """The ids of the parameters, once for each place where they occur."""
    return (id(one) for _, inner in named_modules(module) for one in inner._parameters.values() if one is not None)
