"""Hugging Face ``Trainer``: a callback that logs what plans predicted and what steps took.

``Trainer(model=lowtide.rematerialize(model, budget="40%"), callbacks=[LowtideCallback()])``; nothing else is needed.
"""

from __future__ import annotations

import logging
from typing import Any

from lowtide.extras import require
from lowtide.integrations.passes import PassMeter

_LOG = logging.getLogger(__name__)
_TrainerCallback: Any = require("transformers").TrainerCallback


class LowtideCallback(_TrainerCallback):  # type: ignore[misc]
    """Adds predicted and measured peak and overhead to every log of a ``Trainer``.

    The measured peak is the highest of all passes since the last log, including what the trainer allocates around the
    model. ``history``: (global step, peak bytes) of every step, except steps in which operators were measured for a
    plan. Reporters that come before this callback see a log before the figures are added; ``state.log_history`` always
    has them.
    """

    def __init__(self) -> None:
        self.meter = PassMeter()
        self.history = self.meter.history
        self._logged = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.begin(kwargs["model"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.stop()
        self.meter.start()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.stop()
        self.meter.end(kwargs["model"], state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        recent = [peak for _, peak in self.history[self._logged :]]
        if not recent:
            return
        self._logged = len(self.history)
        found = self.meter.figures(kwargs["model"], max(recent))
        for log in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if log is not None:
                log.update(found)
        _LOG.info("step %d: %s", state.global_step, found)
