"""``lowtide place FILE.csv``: offsets for buffers, within a capacity or as low as can be found; needs no torch.

FILE.csv has MiniMalloc's format: ``id,lower,upper,size``. A buffer is live from ``lower`` until before ``upper``. If
there is a column ``offset``, the search starts from this placement. The certified gap is how far the height of the
placement lies above the proven lower bound, in percent of that bound.
"""

from __future__ import annotations

import argparse
import json

from lowtide.budget import parse_budget
from lowtide.cli.options import seed
from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.place import Buffers, Placement, place, read_buffers, write_buffers
from lowtide.report.tables import fact_lines
from lowtide.solve import Status
from lowtide.units import exact_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE.csv", help="buffers: id,lower,upper,size[,offset]")
    add("--capacity", help='bytes to place them in, or "8MiB" (default: as few as can be found)')
    add("--time", type=float, default=60.0, metavar="SECONDS", help="to search for (default: 60)")
    add("--align", type=int, default=1, metavar="BYTES", help="offsets are multiples of it (default: 1)")
    add("--seed", type=seed, default=0, help="seed of the search (default: 0)")
    add("--json", action="store_true", help="print one JSON object, the offsets included")
    add("-o", "--output", metavar="OUT.csv", help="write the buffers with their offsets")


def run(options: argparse.Namespace) -> int:
    if not options.time > 0:
        raise PlanError(f"--time is {options.time:g} seconds, but must be above 0.")
    ids, buffers, start = read_buffers(options.file, options.align)
    capacity = None if options.capacity is None else parse_budget(options.capacity, buffers.load_bytes, what="capacity")
    found = place(buffers, capacity, start=start, seed=options.seed, seconds=options.time, most_visits=float("inf"))
    if capacity is not None and not found.status.solved:
        raise _no_fit(ids, buffers, capacity, found)
    if options.output:
        write_buffers(options.output, ids, buffers, found.offsets)
    gap = 100 * found.gap
    if options.json:
        summary = {
            "status": found.status.value,
            "capacity_bytes": capacity,
            "reserved_bytes": found.reserved_bytes,
            "lower_bound_bytes": found.lower_bound_bytes,
            "gap_percent": gap,
            "seconds": round(found.seconds, 6),
            "offsets": dict(zip(ids, found.offsets.tolist(), strict=True)),
        }
        print(json.dumps(summary))
        return 0
    reserved, bound = found.reserved_bytes, found.lower_bound_bytes
    facts = {
        "reserved": exact_bytes(reserved),
        "bound": f"{exact_bytes(bound)}: no placement takes up less",
        "gap": f"{gap:.3f} %",
    }
    print("\n".join([f"{found.status.value}: {len(buffers)} buffers in {found.seconds:.2f} s", *fact_lines(facts)]))
    return 0


def _no_fit(ids: tuple[str, ...], buffers: Buffers, capacity: int, found: Placement) -> InfeasibleBudgetError:
    """Why no placement within the capacity was found, in one line."""
    bound, lowest = found.lower_bound_bytes, found.reserved_bytes
    largest = int(buffers.padded.argmax())
    if buffers.padded[largest] > capacity:
        why = f"buffer {ids[largest]} alone takes up {buffers.padded[largest]} bytes"
    elif found.status is Status.INFEASIBLE:
        live = f"{bound} bytes are live at one time"
        why = live if bound == buffers.load_bytes else "the search has tried all placements"
    else:
        why = f"none was found in {found.seconds:.1f} s (--time), which proves nothing"
    fits = "is proven not to fit" if found.status is Status.INFEASIBLE else "was not made to fit"
    known = f"the lowest placement that was found takes up {lowest} bytes"
    return InfeasibleBudgetError(
        f"the placement {fits} {capacity} bytes: {why}; {known}.", minimum_bytes=lowest, budget_bytes=capacity
    )
