"""Lightning: a callback that logs what plans predicted and what steps took.

Make and rematerialize the model in ``configure_model``; add ``Trainer(callbacks=[LowtideCallback()])`` for the figures.
"""

from __future__ import annotations

import logging
from typing import Any

from lowtide.extras import require
from lowtide.integrations.passes import PassMeter

_LOG = logging.getLogger(__name__)
_Callback: Any = require("pytorch_lightning").Callback


class LowtideCallback(_Callback):  # type: ignore[misc]
    """Logs predicted and measured peak and overhead of every training batch through the module's logger.

    The measured peak is that of the batch's pass, including what ``training_step`` allocates around the model.
    ``history``: (global step before it, peak bytes) of every batch, except batches in which operators were measured for
    a plan.
    """

    def __init__(self) -> None:
        self.meter = PassMeter()
        self.history = self.meter.history
        self._step = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        self.meter.begin(pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.meter.stop()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        counts = self.meter.end(pl_module, self._step)
        found = self.meter.figures(pl_module, self.meter.peak_bytes) if counts else {}
        if found:
            pl_module.log_dict(found)
            _LOG.info("step %d: %s", self._step, found)
