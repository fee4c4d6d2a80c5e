"""``lowtide run --budget 60% train.py ARGS``: run an unchanged training script inside a memory budget.

A model is found when the script first calls it in training mode, and planned for this call. The budget holds for the
forward and backward pass of each model. Results equal those of the script alone to the bit (to rounding with
``--chunked-loss``). ``-m MODULE ARGS`` runs a module. With ``--online`` the whole script runs inside
``lowtide.online``, without plans. A summary on stderr follows in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.cli.options import add_chunked_loss_option, add_offload_options, add_planner_options, given
from lowtide.errors import ExecutionError, PlanError
from lowtide.report.tables import fact_lines, table_lines
from lowtide.report.writers import writer_of
from lowtide.settings import Settings
from lowtide.store import write_atomically
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.integrations.roots import Roots

SUMMARY_FORMAT = "lowtide-run/1"
_MOST_ROWS, _MOST_NAMES = 30, 5


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget", help='of each pass: "60%%" of its own peak (the default), or "8GiB"')
    add("--total", metavar="BYTES", help="of everything, with parameters, gradients, optimizer states")
    add("--reserve", default=0, metavar="BYTES", help="to leave for what runs between the passes")
    add("--online", action="store_true", help="hold the whole script to --budget BYTES, without plans")
    add_planner_options(parser)
    add("--compiler", choices=("eager", "inductor"), help="default: inductor for compiled models")
    add("--planning", choices=("background", "wait"), help="see lowtide.rematerialize")
    add_offload_options(parser)
    add_chunked_loss_option(parser)
    add("--skip", action="append", default=[], metavar="CLASS", help="leave models of this class alone")
    add("--report", metavar="FILE", help=".json: the summary; .html, .txt...: the largest plan")
    add_script_options(parser)


def add_script_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [options] (SCRIPT | -m MODULE) ARGS"
    parser.add_argument("-m", dest="as_module", action="store_true", help="run a module, by its name, not a file")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a script, and its arguments")


def script_of(options: argparse.Namespace) -> tuple[str, list[str], bool]:
    """The file or module to run, its arguments, and whether it is a module."""
    words = options.script
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise PlanError("name a script, such as lowtide run --budget 60% train.py, or a module with -m.")
    return words[0], words[1:], options.as_module


def run(options: argparse.Namespace) -> int:
    target, arguments, as_module = script_of(options)
    if options.report and not options.report.endswith(".json"):
        writer_of(options.report)  # raises for an unknown extension
    settings = _settings(options)
    from lowtide.integrations.interpreter import run_script

    if options.online:
        with _online(options):
            return run_script(target, arguments, as_module=as_module)
    from lowtide.integrations.scripts import planned_roots

    found = planned_roots(settings, options.skip, say)
    try:
        with found:
            return run_script(target, arguments, as_module=as_module)
    except ExecutionError:
        names = " ".join(f"--skip {root.kind}" for root in found.roots if not root.outside)
        say(f"a planned model was used in a way that a plan cannot follow; leave it alone with {names}")
        raise
    finally:
        if found.roots or sys.exc_info()[0] is None:
            _summarize(found, options)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of ``lowtide.rematerialize``. Raises ``PlanError`` before anything runs."""
    budget = options.budget if options.budget or options.total else "60%"
    names = ("reserve", "planner", "seed", "compiler", "planning", "offload", "offload_budget", "chunked_loss")
    settings = {"budget": budget, "total_budget": options.total, **given(options, *names)}
    Settings(**{name: value for name, value in settings.items() if value is not None})
    return settings


@contextlib.contextmanager
def _online(options: argparse.Namespace) -> Iterator[None]:
    import lowtide

    if not options.budget:
        raise PlanError("--online needs a --budget in bytes, such as 8GiB.")
    context = lowtide.online(options.budget)
    try:
        with context:
            yield
    finally:
        did = context.statistics
        counted = {
            "budget": format_bytes(did.budget_bytes),
            "peak": format_bytes(did.peak_bytes),
            "evictions": f"{did.evictions}, {did.rematerializations} rebuilt",
            "overhead": f"{did.overhead_percent:.1f} %",
        }
        print("\n".join(["lowtide: the script ran online", *fact_lines(counted)]), file=sys.stderr)


def speaks() -> bool:
    """Whether this process prints: the first of those that train together, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    if speaks():
        print(f"lowtide: {line}", file=sys.stderr, flush=True)


def _summarize(found: Roots, options: argparse.Namespace) -> None:
    from lowtide.integrations.scripts import HEADER, beyond, cells, facts

    report: str | None = options.report

    sys.stdout.flush()
    if not speaks():
        return
    if not found.roots:
        say("nothing was planned: this process called no module in training mode (model.train()) with gradients")
    else:
        lines = table_lines([HEADER, *map(cells, found.roots[:_MOST_ROWS])])
        more = len(found.roots) - _MOST_ROWS
        lines += [f"and {more} more"] if more > 0 else []
        lines += [line for root in found.roots if (line := beyond(root, options.reserve))]
        say("\n".join(["what was trained, bytes of its largest pass", *lines, *_outside(found), *_process_lines()]))
    if report is None:
        return
    if report.endswith(".json") and not report.endswith(".trace.json"):
        data = {"format": SUMMARY_FORMAT, "peak_bytes": found.peak_bytes, "passes": found.passes}
        text = json.dumps(data | {"models": [facts(root) for root in found.roots]}, indent=1)
        write_atomically(Path(report), text + "\n")
        return
    plans = [root.plan for root in found.roots if root.plan is not None]
    if plans:
        max(plans, key=lambda plan: plan.unconstrained_peak_bytes).report(report)
    say(f"report written to {report}" if plans else f"there is no plan to write to {report}")


def _outside(found: Roots) -> list[str]:
    """What ran without a plan or in parts, one line per reason."""
    names: dict[str, list[str]] = {}
    for root in found.roots:
        reason = f"outside of any plan: {root.outside}" if root.outside else root.in_parts
        if reason:
            names.setdefault(reason, []).append(root.name)
    lines = []
    for reason, alike in names.items():
        more = f" and {len(alike) - _MOST_NAMES} more" if len(alike) > _MOST_NAMES else ""
        lines.append(f"{', '.join(alike[:_MOST_NAMES])}{more}: {reason}")
    return lines


def _process_lines() -> list[str]:
    """The process's peaks, by the allocation counters that exist."""
    import torch

    from lowtide.device import accelerator_in_use
    from lowtide.memory.allocators import meter_of

    lines = []
    if (meter := meter_of(torch.device("cpu"))) is not None:
        lines.append(f"{format_bytes(meter.peak_bytes)} of CPU tensors, measuring for plans included")
    accelerator = accelerator_in_use()
    if accelerator is not None and accelerator.has_statistics:
        lines.append(f"{format_bytes(accelerator.peak_bytes())} on {accelerator.device}")
    return [f"the process: at most {line}" for line in lines]
