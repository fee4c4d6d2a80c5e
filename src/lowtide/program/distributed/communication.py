"""What all collectives have in common: errors in plain words, and copies that outlive them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from lowtide.errors import ExecutionError
from lowtide.memory.allocators import allocated_bytes, round_up

_PATIENCE_SECONDS = 0.02  # for copies to go: others may allocate meanwhile
_POLL_SECONDS = 20e-6


@contextlib.contextmanager
def communicating(what: str) -> Iterator[None]:
    """Inside, an error of a collective says in plain words that another process has not come to it."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ExecutionError(
            f"collective {what} failed: another process has ended, failed, or not come to it in time ({reason})."
        ) from error


def wait_for_copies(before: int | None, made: Sequence[torch.Tensor], device: torch.device) -> None:
    """On the CPU gloo's threads hold copies of what a collective moves until a moment after it has returned: wait until they
    have let go, so that what follows does not come on top. ``before``: what was allocated when it began, perhaps with copies of
    an earlier one, so they are gone only when nothing more goes."""
    if before is None or device.type != "cpu":
        return
    level = before + sum(round_up(tensor.untyped_storage().nbytes(), device) for tensor in made)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    now, last = allocated_bytes(device) or 0, None
    while (now > level or now != last) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        now, last = allocated_bytes(device) or 0, now
