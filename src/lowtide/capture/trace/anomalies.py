"""Skip the NaN check of traced gradients in anomaly mode: they have no values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from lowtide.capture.trace.patches import wrapped


def gradients_unchecked() -> AbstractContextManager[None]:
    """Inside, PyTorch's engine does not check gradients for NaN in anomaly mode (``torch.autograd.detect_anomaly()``).
    Anomaly mode itself stays on as seen by user code. The gradients of planned calls are checked when these run.
    PyTorch has one flag for all threads, so those of other threads are not checked meanwhile."""
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
