"""A script or a module run as ``python`` runs it: ``__main__`` is its own until its threads have ended, and again for what it
leaves to do at the end of the process (``atexit``)."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import thread as pools
from types import ModuleType, TracebackType
from typing import Any

from lowtide.errors import LowtideError, PlanError
from lowtide.integrations import roots

INTERRUPTED = 130
_OURS = (__file__, roots.__file__, runpy.__file__, "<frozen runpy>")


class Enough(SystemExit):
    """Ends a script from within; threads that it started are not waited for."""


def run_script(target: str, arguments: Sequence[str], *, as_module: bool) -> int:
    """Run a file, or a module by its name, as ``python`` does; returns the exit code.

    Raises ``PlanError`` where there is no such file or module, and whatever error of this package ends the script.
    """
    folder = os.getcwd() if as_module else os.path.dirname(os.path.realpath(target))
    threads, left = threading.enumerate(), _left_to_do()
    with _process(target, arguments, folder):
        code, variables, waits = _run(target, as_module)
        if not waits:
            return code
        main = ModuleType("__main__")
        main.__dict__.update(variables)
        if _left_to_do() > left:
            atexit.register(_put_back, main, sys.argv, [*sys.path])  # the last one, so it is called first
        with _main_is(main):
            return code if _wait(threads) else INTERRUPTED


def _run(target: str, as_module: bool) -> tuple[int, Mapping[str, Any], bool]:
    """The exit code, the variables of what ran, and whether its threads are waited for."""
    try:
        if as_module:
            return 0, runpy.run_module(target, run_name="__main__", alter_sys=True), True
        if not os.path.exists(target):
            raise PlanError(f"there is no script {target}; give a file, or a module with -m.")
        return 0, runpy.run_path(target, run_name="__main__"), True
    except LowtideError:
        raise
    except BaseException as error:  # noqa: BLE001 - the interpreter's own last resort
        own = _without_our_frames(error.__traceback__)
        variables = {} if own is None else own.tb_frame.f_globals
        return _told(error, own, target), variables, not isinstance(error, Enough)


def _told(error: BaseException, own: TracebackType | None, target: str) -> int:
    """The exit code for what ended a script, after what the interpreter says of it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        return 1
    if own is None and isinstance(error, ImportError):
        raise PlanError(f"{target} cannot be run: {error}.") from None
    sys.excepthook(type(error), error.with_traceback(own), own)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1


@contextlib.contextmanager
def _process(target: str, arguments: Sequence[str], folder: str) -> Iterator[None]:
    """Inside, arguments and the first folder of the path are those of the script."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = folder
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _main_is(module: ModuleType) -> Iterator[None]:
    known = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = known


def _put_back(main: ModuleType, argv: list[str], path: list[str]) -> None:
    sys.modules["__main__"], sys.argv, sys.path[:] = main, argv, path


def _left_to_do() -> int:
    """How many functions are called at the end of the process."""
    return atexit._ncallbacks()


def _wait(known: Collection[threading.Thread]) -> bool:
    """Until those threads have ended that the interpreter would wait for; false if it was interrupted. Those of pools end when
    the interpreter tells them to."""
    pooled = getattr(pools, "_threads_queues", {})
    try:
        while True:
            started = [one for one in threading.enumerate() if one not in known and one not in pooled]
            waited_for = [one for one in started if not one.daemon and one is not threading.current_thread()]
            if not waited_for:
                return True
            waited_for[0].join()
    except KeyboardInterrupt:
        return False


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    entries = []
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename not in _OURS:
            entries.append(traceback)
        traceback = traceback.tb_next
    rest = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest
