"""The intermediate representation: graphs, costs and schedules, with their simulator and checker. No torch."""

from lowtide.ir.checker import check
from lowtide.ir.costs import Costs, SecondMemory
from lowtide.ir.graph import Graph, Op, Phase, Storage, Value
from lowtide.ir.schedule import Compute, Fetch, Free, Offload, RestoreRng, SaveRng, Schedule, Step
from lowtide.ir.sequence import (
    collectives_of,
    is_view,
    keep_all_schedule,
    may_run_early,
    needed_ops,
    plain_time_ns,
    schedule_from_sequence,
    shared_storages,
)
from lowtide.ir.serial import (
    graph_from_json,
    graph_to_json,
    load_instance,
    schedule_from_json,
    schedule_to_json,
)
from lowtide.ir.simulator import (
    Allocation,
    Kind,
    Simulation,
    resident_bytes,
    simulate,
)
from lowtide.ir.text import format_graph, format_schedule
from lowtide.ir.transfers import Clock, Lane, Timing, Transfer, awaited, timing

__all__ = [
    "Allocation",
    "Clock",
    "Compute",
    "Costs",
    "Fetch",
    "Free",
    "Graph",
    "Kind",
    "Lane",
    "Offload",
    "Op",
    "Phase",
    "RestoreRng",
    "SaveRng",
    "Schedule",
    "SecondMemory",
    "Simulation",
    "Step",
    "Storage",
    "Timing",
    "Transfer",
    "Value",
    "awaited",
    "check",
    "collectives_of",
    "format_graph",
    "format_schedule",
    "graph_from_json",
    "graph_to_json",
    "is_view",
    "keep_all_schedule",
    "load_instance",
    "may_run_early",
    "needed_ops",
    "plain_time_ns",
    "resident_bytes",
    "schedule_from_json",
    "schedule_from_sequence",
    "schedule_to_json",
    "shared_storages",
    "simulate",
    "timing",
]
