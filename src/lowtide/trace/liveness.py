"""What a traced program needs where nothing is evicted: its storages from their first tensor to their last release."""

from __future__ import annotations

from lowtide.trace.model import Constant, OperatorCall, Pin, Release, Trace


def unconstrained_peak_bytes(trace: Trace) -> int:
    """Constants included; a write of what a call made needs room for the new version beside the old one."""
    storage_of: dict[int, int] = {}  # tensor -> the first tensor of its storage
    sizes: dict[int, int] = {}  # first tensor -> bytes
    held: dict[int, int] = {}
    lasting: set[int] = set()
    live = peak = 0
    for event in trace.events:
        match event:
            case Constant():
                storage_of[event.tensor], sizes[event.tensor], held[event.tensor] = event.tensor, event.bytes, 1
                lasting.add(event.tensor)
                live += event.bytes
                peak = max(peak, live)
            case OperatorCall():
                for created in event.creates:
                    alias = created.alias_of
                    first = storage_of[created.tensor] = created.tensor if alias is None else storage_of[alias]
                    sizes.setdefault(first, created.bytes)
                    held[first] = held.get(first, 0) + 1
                    live += created.bytes
                    if event.once:
                        lasting.add(first)
                written = {storage_of[tensor] for tensor in event.writes} - lasting
                peak = max(peak, live + event.workspace_bytes + sum(sizes[first] for first in written))
            case Release():
                first = storage_of[event.tensor]
                held[first] -= 1
                live -= 0 if held[first] else sizes[first]
            case Pin():
                pass
    return peak
