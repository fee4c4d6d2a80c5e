"""A search that continues in its own process while training runs with a first plan.

It is a process because a thread would slow training through the interpreter's lock. It does not import torch, takes
some tens of megabytes of host memory, runs at low priority, and can be ended at once. A thread waits for its results;
every plan is checked and simulated again here, on the program at hand.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Generic, TypeVar

import msgspec

from lowtide.errors import LowtideError
from lowtide.planning.cache import PlanRequest
from lowtide.planning.plan import Plan

_LOG = logging.getLogger(__name__)
_SHOWN = 500  # characters of a dead process's error output
_LISTENING: weakref.WeakSet[_Listener[Any]] = weakref.WeakSet()
Prepared = TypeVar("Prepared")


class BackgroundSearch(Generic[Prepared]):
    """A search for a better plan than ``plan``, made for ``request``, or for a first plan if that is ``None``. It
    starts at once.

    ``prepare`` converts each better plan for use while training goes on; ``take`` returns the latest. The process ends
    with the search, with ``stop``, with this object, and with the process that started it. Raises ``OSError`` if it
    cannot start.
    """

    def __init__(self, request: PlanRequest, plan: Plan | None, prepare: Callable[[Plan], Prepared]) -> None:
        errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        try:
            process = _started(request, plan, errors)
        except OSError:
            errors.close()
            raise
        self._listener = _Listener(request, plan, prepare, process, errors)
        self._kill = weakref.finalize(self, _end, self._listener, os.getpid())
        try:
            self._listener.thread.start()
        except RuntimeError as error:
            self._kill()
            raise OSError(str(error)) from error

    @property
    def ended(self) -> bool:
        """Whether no better plan will come; ``take`` may still return the last one."""
        return self._listener.ended

    @property
    def plan(self) -> Plan | None:
        """The best plan so far."""
        return self._listener.plan

    def take(self) -> Prepared | None:
        """What was prepared since the last call, or ``None``; never waits."""
        listener = self._listener
        if listener.latest is None:
            return None
        with listener.changed:
            latest, listener.latest = listener.latest, None
        return latest

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end of the search, at most ``seconds``. Returns whether it has ended."""
        with self._listener.changed:
            return self._listener.changed.wait_for(lambda: self._listener.ended, seconds)

    def stop(self) -> None:
        self._kill()


@dataclass(eq=False)
class _Listener(Generic[Prepared]):
    """The thread's work and results. Must not keep the search alive."""

    request: PlanRequest
    plan: Plan | None
    prepare: Callable[[Plan], Prepared]
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    began: float = field(default_factory=time.monotonic)
    changed: threading.Condition = field(default_factory=threading.Condition)
    latest: Prepared | None = None
    ended: bool = False

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self.run, name="lowtide plans", daemon=True)
        _LISTENING.add(self)

    def run(self) -> None:
        assert self.process.stdout is not None
        why = None
        try:
            while not self.ended and why is None:
                line = self.process.stdout.readline()
                if not line:
                    why = f"its process ended with code {self.process.wait()} {self._said()}".strip()
                elif not self.ended:
                    why = self._take(msgspec.json.decode(line, type=_Message))
        except Exception as error:  # noqa: BLE001 - training goes on after any error
            why = f"{type(error).__name__}: {error}"
        if why is not None and not self.ended:
            if self.plan is None:
                _LOG.info("the search for a plan has ended: %s", why)
            else:
                _LOG.warning("the search for a better plan has ended: %s. The plan in force stays.", why)
        self.process.stdout.close()
        self.errors.close()
        self.end()

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    def _take(self, message: _Message) -> str | None:
        """Prepare the plan of a message. Returns the reason if there is none."""
        if message.error:
            return message.error
        try:
            found = Plan.from_json(message.plan, self.request.graph, self.request.costs)
        except LowtideError as error:
            return f"a plan that it found is not sound ({error})"
        if self.plan is None or found.time_ns < self.plan.time_ns or message.done:
            seconds = time.monotonic() - self.began
            self.plan = self.plan.improved(found, seconds, self.request.placed) if self.plan else found
            prepared = self.prepare(self.plan)
            with self.changed:
                self.latest = prepared
        if message.done:
            self.end()
        return None

    def _said(self) -> str:
        """The end of the process's error output."""
        self.errors.seek(0)
        text = self.errors.read().decode(errors="replace").strip()
        return f"({text[-_SHOWN:]})" if text else ""


def _started(request: PlanRequest, plan: Plan | None, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    if not sys.executable:
        raise FileNotFoundError("this interpreter does not know its own program")
    with tempfile.TemporaryFile() as asked:  # not a pipe, which would block until it is read
        pickle.dump((request, math.inf if plan is None else plan.time_ns, os.getpid()), asked)
        asked.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "lowtide.planning.worker"],
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )


class _Message(msgspec.Struct):
    """A line of the process's output."""

    plan: object = None
    error: str = ""
    done: bool = False


def _end(listener: _Listener[Any], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        listener.end()
        listener.process.kill()
        listener.process.wait()


@atexit.register
def _end_all() -> None:
    """Wait for threads that prepare plans: a thread that returns from PyTorch after Python has shut down would abort
    the process."""
    alive = [listener for listener in list(_LISTENING) if listener.thread.is_alive()]
    with _uninterrupted() if alive else contextlib.nullcontext():
        for listener in alive:
            _end(listener, os.getpid())
            listener.thread.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A context that ignores Ctrl-C, so that an impatient user does not get a traceback from here."""
    former = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if former is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
