"""What all collectives share: error messages, and a wait for copies that outlive them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from lowtide.errors import ExecutionError
from lowtide.memory.allocators import allocated_bytes, round_up

_PATIENCE_SECONDS = 0.02  # to wait for copies; other code may allocate meanwhile
_POLL_SECONDS = 20e-6


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """A context in which an error of a collective explains that another process has not reached it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ExecutionError(
            f"collective {what} failed: another process has ended, failed, or not come to it in time ({reason})."
        ) from error


def wait_for_copies(before: int | None, made: Sequence[torch.Tensor], device: torch.device) -> None:
    """On the CPU, gloo's threads hold copies of what a collective moves until a moment after it has returned. Wait
    until they are freed, so that later allocations do not add to them. ``before``: bytes allocated when it began,
    perhaps with copies of an earlier collective, so they are gone only when the level stops falling."""
    if before is None or device.type != "cpu":
        return
    level = before + sum(round_up(tensor.untyped_storage().nbytes(), device) for tensor in made)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    now, last = allocated_bytes(device) or 0, None
    while (now > level or now != last) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now, last = allocated_bytes(device) or 0, now
