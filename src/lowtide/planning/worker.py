"""The process in which a plan improves while its model trains, see ``background``.

``python -m lowtide.planning.worker`` reads a pickled ``PlanRequest`` with the id of the requesting process. It writes
lines of JSON: better plans as they are found, and finally the planner's answer, which is also kept in the plan cache,
or an error. It ends when the requesting process is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from lowtide.planning.cache import PlanCache, PlanRequest, enabled
from lowtide.planning.plan import Plan

_NICENESS = 10  # about a tenth of the time of a core that training uses too
_LEAST_GAIN = 0.003  # of the time of a step: least gain that is worth an exchange
_LARGE_GAIN = 0.01  # gain from which a plan is sent at once
_LEAST_SECONDS = 0.5  # between two plans with smaller gains


class _Telling:
    """Writes plans that are better by enough than the current one, whose time is ``time_ns``, and not too often."""

    def __init__(self, time_ns: float, output: BinaryIO) -> None:
        self.time_ns = time_ns
        self.output = output
        self._latest = -math.inf

    def on_better(self, time_ns: int, make: Callable[[], Plan | None]) -> None:
        now = time.monotonic()
        least = _LARGE_GAIN if now - self._latest < _LEAST_SECONDS else _LEAST_GAIN
        if time_ns > (1 - least) * self.time_ns:
            return
        plan = make()
        if plan is not None and plan.time_ns < self.time_ns:
            self._latest, self.time_ns = now, plan.time_ns
            self.write(plan=plan.to_json(graph=False, costs=False))

    def write(self, **message: Any) -> None:
        self.output.write(msgspec.json.encode(message) + b"\n")
        self.output.flush()


def search(request: PlanRequest, time_ns: float, output: BinaryIO, parent: int) -> None:
    """Search for the plan of ``request``, to replace one that takes ``time_ns``. Ends when the process ``parent`` is
    gone, which may happen before this one has started."""
    telling = _Telling(time_ns, output)

    def on_progress(stage: str, fraction: float) -> None:
        if os.getppid() != parent:
            raise SystemExit

    def make() -> Plan:
        return request.make(on_progress, telling.on_better)

    plan = PlanCache().get_or_make(request, make) if enabled() else make()
    telling.write(plan=plan.to_json(graph=False, costs=False), done=True)


def main() -> None:
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICENESS)
    request, time_ns, parent = pickle.load(sys.stdin.buffer)  # written by the process that started this one
    output = sys.stdout.buffer
    try:
        search(request, time_ns, output, parent)
    except (KeyboardInterrupt, BrokenPipeError):
        pass  # the requesting process is gone
    except Exception as error:  # noqa: BLE001 - the requesting process reports it
        _Telling(time_ns, output).write(error=f"{type(error).__name__}: {error}", done=True)


if __name__ == "__main__":
    main()
