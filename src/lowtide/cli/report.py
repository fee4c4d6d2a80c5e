"""``lowtide report FILE -o OUT``: a saved plan, or the trace of an online run, as a report or as a file for other
tools.

The extension of OUT chooses the form: .html (one self-contained page), .trace.json (Chrome Trace Events, for Perfetto),
.pickle (a snapshot of the predicted step for pytorch.org/memory_viz), .svg (memory over the step), .map.svg (the
address of every tensor of a plan against time), .txt. A page includes a curve of overhead against budget. If the plan
was saved without one, it is planned now, in seconds per point; ``--no-curve`` leaves it out.
"""

from __future__ import annotations

import argparse
import sys

from lowtide.budget import parse_budget
from lowtide.errors import PlanError, ScheduleError
from lowtide.ir.serial import read_json
from lowtide.memory.measurement import Measurement, load_measurement
from lowtide.planning import Plan
from lowtide.progress import progress_bar
from lowtide.report.report import Report, artefact_name, report_of_trace, without_constants
from lowtide.report.text import report_text
from lowtide.report.writers import write_report, writer_of
from lowtide.trace import read_trace, unconstrained_peak_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="a saved plan, a lowtide-trace/1, or a log published with DTR")
    add("-o", "--output", metavar="OUT", action="append", help="may be given several times")
    add("--measurement", metavar="FILE", help="what lowtide.measure(...).save(FILE) wrote")
    add("--no-curve", action="store_true", help="leave out overhead against budget where it is not saved")
    traces = parser.add_argument_group("for traces")
    traces.add_argument("--budget", help='to replay in, such as "50%%"; by default that of the recorded run')
    traces.add_argument("--heuristic", help="which tensors go first (default: dtr-eq)")


def run(options: argparse.Namespace) -> int:
    outputs = options.output or []
    for path in outputs:
        writer_of(path)  # raises for an unknown extension
    measured = load_measurement(options.measurement) if options.measurement else None
    if _is_plan(options.file):
        report = _of_plan(options, measured)
    else:
        trace = without_constants(read_trace(options.file))
        budget = parse_budget(options.budget, unconstrained_peak_bytes(trace)) if options.budget else None
        heuristic = options.heuristic or "dtr-eq"
        report = report_of_trace(trace, budget, heuristic, measured=measured, name=artefact_name(options.file))
    for path in outputs:
        write_report(report, path)
        print(f"report written to {path}", file=sys.stderr)
    if not outputs:
        print(report_text(report), end="")
    return 0


def _of_plan(options: argparse.Namespace, measured: Measurement | None) -> Report:
    if options.budget or options.heuristic:
        raise PlanError(f"{options.file} is a plan, whose budget is given; --budget and --heuristic are for traces.")
    try:
        plan = Plan.load(options.file)
    except ScheduleError as error:  # the fault lies in the file
        raise PlanError(f"{options.file}: its schedule is not valid: {error}") from error
    drawn = any(path.endswith(".html") for path in options.output or [])
    if drawn and not options.no_curve and plan.known_curve is None:
        with progress_bar() as on_progress:
            plan = plan.with_curve(on_progress=on_progress)
    return plan.as_report(measured, name=artefact_name(options.file))


def _is_plan(path: str) -> bool:
    """Whether the file holds a plan, which is one JSON object. A trace is compressed or has one line per event. Raises
    ``PlanError`` for anything else."""
    if path.endswith(".gz"):
        return False
    try:
        found = read_json(path)
    except PlanError as error:
        if "is not JSON" not in str(error):
            raise
        return False
    if "schedule" not in found and "format" not in found:
        keys = ", ".join([*found][:5])
        raise PlanError(f"{path} is neither a saved plan nor a trace: a JSON object with {keys or 'nothing in it'}.")
    return "schedule" in found
