"""Gradients that are traced are not looked at for what is no number: they have no values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide.capture.trace.patches import wrapped


def gradients_unchecked() -> AbstractContextManager[None]:
    """Inside, PyTorch's engine does not read gradients where anomalies are looked for (``torch.autograd.detect_anomaly()``).
    That they are looked for is told as before. When planned calls run, it reads those that they give it. PyTorch has one flag
    for all threads: those of others go unread meanwhile."""
    return wrapped(torch.autograd, "_engine_run_backward", _unchecked)


def _unchecked(run: Callable[..., Any]) -> Callable[..., Any]:
    def engine(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
            return run(*args, **kwargs)
        torch.set_anomaly_enabled(True, check_nan=False)
        try:
            return run(*args, **kwargs)
        finally:
            if torch.is_anomaly_enabled():  # another thread may have ended it
                torch.set_anomaly_enabled(True, check_nan=True)

    return engine
