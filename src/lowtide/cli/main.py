"""``lowtide COMMAND``. Exit codes: 0 success, 2 wrong usage or input, 3 infeasible budget or capacity."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from lowtide.cli import advise, compare, demo, env, fits, max_batch, place, plan, planners, report, run, solve, trace
from lowtide.errors import InfeasibleBudgetError, LowtideError, OnlineBudgetError, ScheduleError
from lowtide.version import __version__

DONE, INTERRUPTED = 0, 130
_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_CODES = {
    InfeasibleBudgetError: 3,
    OnlineBudgetError: 3,
    ScheduleError: 1,
    LowtideError: 2,
}  # first match counts; 1 is a defect of lowtide
_COMMANDS = {
    run: "run a training script inside a budget",
    advise: "watch a training script, and say what each budget costs",
    demo: "train a small GPT-2 inside a budget",
    plan: "plan the training pass of a model",
    fits: "say whether a model trains on a device, and what takes its memory",
    max_batch: "find the largest batch for a memory budget",
    solve: "plan a graph from a file",
    place: "give buffers from a file their offsets",
    compare: "compare planners on graphs from files",
    trace: "replay a recorded program within a budget",
    report: "make a page, a trace or a picture of a plan",
    planners: "list the planners and their options",
    env: "show versions, device, caches and optional packages",
}


class _Parser(argparse.ArgumentParser):
    """Prints usage errors in one line, like all other errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(_CODES[LowtideError], f'lowtide: {message}; see "{self.prog} --help".\n')


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lowtide", description="Train PyTorch models inside a memory budget.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command, summary in _COMMANDS.items():
        name = command.__name__.rpartition(".")[2].replace("_", "-")
        add_options = getattr(command, "add_options", None)
        description = command.__doc__ if add_options else None
        # No abbreviations: a script's own options could be taken for abbreviations of ours.
        parser_of = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
        parser_of.set_defaults(run=command.run)
        if add_options is not None:
            add_options(parser_of)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        _flush()
        return _interrupted() if code == INTERRUPTED else code
    except LowtideError as error:
        print(f"lowtide: {error}", file=sys.stderr)
        return next(code for kind, code in _CODES.items() if isinstance(error, kind))
    except KeyboardInterrupt:
        return _interrupted()
    except BrokenPipeError:  # the reader has closed the pipe, `lowtide plan ... | head`
        _drop_output()
        return DONE
    except OSError as error:
        scripts = options.run in (run.run, advise.run)  # a script's own errors are shown as by Python
        if scripts or error.errno not in _UNWRITTEN or error.filename is not None:
            raise
        _drop_output()
        print(f"lowtide: cannot write what is printed: {error.strerror}.", file=sys.stderr)
        return _CODES[LowtideError]


def _interrupted() -> int:
    """Only the end of the interpreter is left. A second interrupt now ends the process at once, without a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return INTERRUPTED


def _flush() -> None:
    if sys.stdout is not None:  # it is None if closed, `lowtide planners >&-`
        sys.stdout.flush()


def _drop_output() -> None:
    """Discard output that is not written yet, so that Python does not try to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
