"""``lowtide COMMAND``: errors become exit codes, 0 done, 2 bad usage or input, 3 infeasible budget."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lowtide.cli import compare, demo, env, max_batch, plan, planners, report, solve, trace
from lowtide.errors import InfeasibleBudgetError, LowtideError, ScheduleError
from lowtide.version import __version__

DONE, DEFECT, BAD_INPUT, INFEASIBLE, INTERRUPTED = 0, 1, 2, 3, 130
_COMMANDS = (demo, plan, max_batch, solve, compare, trace, report, planners, env)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowtide", description="Train PyTorch models inside a memory budget.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = build_parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except InfeasibleBudgetError as error:
        return _fail(error, INFEASIBLE)
    except ScheduleError as error:
        return _fail(error, DEFECT)
    except LowtideError as error:
        return _fail(error, BAD_INPUT)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, `lowtide plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE


def _fail(error: LowtideError, code: int) -> int:
    print(f"lowtide: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
