"""Recorded programs: the trace model and its files, the logs published with DTR, a simulator, and graphs made from
traces. Imports no torch."""

from lowtide.trace.checker import check_trace
from lowtide.trace.files import TRACE_FORMAT, TraceWriter, read_trace, write_trace
from lowtide.trace.graph import trace_to_dag, trace_to_graph
from lowtide.trace.model import Constant, Created, Event, OperatorCall, Pin, Release, Trace
from lowtide.trace.replay import ReplayStatus, ReplayWatcher
from lowtide.trace.simulator import POLICIES, ReplayResult, simulate, unconstrained_peak_bytes

__all__ = [
    "POLICIES",
    "TRACE_FORMAT",
    "Constant",
    "Created",
    "Event",
    "OperatorCall",
    "Pin",
    "Release",
    "ReplayResult",
    "ReplayStatus",
    "ReplayWatcher",
    "Trace",
    "TraceWriter",
    "check_trace",
    "read_trace",
    "simulate",
    "trace_to_dag",
    "trace_to_graph",
    "unconstrained_peak_bytes",
    "write_trace",
]
