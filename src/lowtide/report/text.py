"""A report as text."""

from __future__ import annotations

from lowtide.ir import Timing
from lowtide.memory.measurement import Measurement
from lowtide.place import CudaMemory
from lowtide.report.modules import merge_repeats
from lowtide.report.profile import StepProfile
from lowtide.report.report import Report
from lowtide.report.tables import fact_lines, table_lines
from lowtide.units import format_bytes, format_percent, format_source, format_time

_MOST_ROWS = 40
_MOST_BLOCKS = 12
_HEADER = ("module", "saved", "recomputed ops", "recompute time", "time once")


def report_text(report: Report) -> str:
    """The summary, what is in use at the peak, reserved bytes, the curve, and measurements."""
    parts = [summary_text(report), _alive(report.run)]
    parts += [_reserved(report)] if report.cuda is not None else []
    parts += [str(report.curve)] if report.curve is not None else []
    parts += [_measured(report.run, report.measured)] if report.measured is not None else []
    return "\n\n".join(parts) + "\n"


def summary_text(report: Report) -> str:
    """Budget, peak and overhead; for a plan also the place of the peak, and what each module saves and recomputes."""
    lines = [report.heading, *fact_lines(summary_facts(report))]
    if report.unit == "module":
        rows, left = module_rows(report)
        lines += ["", *table_lines(rows), *filter(None, [left])]
    return "\n".join(lines)


def summary_facts(report: Report) -> dict[str, str]:
    """The facts of the summary about the whole step, by name."""
    planned, whole = report.unit == "module", max(report.plain.peak_bytes, 1)
    peak, share = format_bytes(report.run.peak_bytes), format_percent(report.run.peak_bytes / whole)
    budget = f"{format_bytes(report.budget_bytes)} ({format_percent(report.budget_bytes / whole)} of unconstrained)"
    facts = {"budget": budget}
    facts |= {"predicted peak": f"{peak} ({share})"} if planned else {"peak": peak}
    facts["unconstrained peak"] = format_bytes(report.plain.peak_bytes)
    facts["overhead"] = f"{format_percent(report.overhead)} of {format_time(report.base_ns)}"
    if planned:
        least = report.least_overhead
        facts["overhead's lower bound"] = "none known" if least is None else format_percent(least)
    return facts | report.details


def collectives_text(timing: Timing) -> str:
    """The time of collectives that overlap with computing, and the part of it that no computing hides."""
    all_ns, exposed_ns = timing.collective_ns, timing.exposed_ns
    return f"{format_time(all_ns)} beside computing, {format_time(exposed_ns)} of it exposed"


def moved_text(timing: Timing) -> str:
    """The bytes moved to the second memory and back, and the time spent waiting for them."""
    return (
        f"{format_bytes(timing.offloaded_bytes)} to the second memory, {format_bytes(timing.fetched_bytes)} back, at most "
        f"{format_bytes(timing.second_peak_bytes)} there; waits {format_time(timing.wait_ns)}"
    )


def module_rows(report: Report) -> tuple[list[tuple[str, ...]], str]:
    """The table by module (or operator) with its header, and a line about the rows left out, if any."""
    rows, left = merge_repeats(report.rows), ""
    if others := rows[_MOST_ROWS:]:
        saved, again = sum(row.saved_bytes for row in others), sum(row.recomputed_ns for row in others)
        left = f"and {len(others)} more: {format_bytes(saved)} saved, {format_time(again)} recomputed"
    return [(report.unit, *_HEADER[1:]), *(row.cells() for row in rows[:_MOST_ROWS])], left


def _alive(run: StepProfile) -> str:
    """What is in use at the peak, largest first."""
    alive = run.at_peak
    lines = [f"at the peak: {len(alive)} blocks, {format_bytes(sum(block.bytes for block in alive))}"]
    for block in alive[:_MOST_BLOCKS]:
        span = block.span
        where = " ".join(filter(None, (span.module, span.name, format_source(span.source)))) if span else block.detail
        lines.append(f"  {format_bytes(block.bytes):>10}  {block.kind.value:<11}  {where}")
    if left := alive[_MOST_BLOCKS:]:
        lines.append(f"  {format_bytes(sum(block.bytes for block in left)):>10}  in {len(left)} more")
    return "\n".join(lines)


def _reserved(report: Report) -> str:
    """The device memory that the step takes, with addresses and without."""
    found = report.found_map()
    facts = {} if found is None else {"arena": f"{format_bytes(found.reserved_bytes)} reserved"}
    facts |= cuda_facts(*report.cuda()) if report.cuda is not None else {}
    return "\n".join(["memory with addresses, and without under PyTorch's allocator", *fact_lines(facts)])


def cuda_facts(native: CudaMemory, expandable: CudaMemory) -> dict[str, str]:
    """The memory that a step without addresses takes under CUDA's allocator, with native and with expandable
    segments."""

    def taken(found: CudaMemory) -> str:
        reserved, least = format_bytes(found.reserved_bytes), format_bytes(found.smallest_device_bytes)
        return f"{reserved} reserved, {least} of a device are enough ({format_percent(found.fragmentation)} lost)"

    return {"CUDA": taken(native), "CUDA, expandable": taken(expandable)}


def _measured(run: StepProfile, measured: Measurement) -> str:
    """Predicted and measured figures."""
    reserved = "" if measured.reserved_bytes is None else f", {format_bytes(measured.reserved_bytes)} reserved"
    facts = {
        "peak": f"{format_bytes(run.peak_bytes)} predicted, {format_bytes(measured.peak_bytes)} measured{reserved}",
        "time": f"{format_time(run.time_ns)} predicted, {format_time(measured.time_ns)} measured",
    }
    return "\n".join([f"measured on {measured.device}", *fact_lines(facts)])
