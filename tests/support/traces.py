"""Small traces: random ones with everything a trace can say, and the quickest way to run the plain ones."""

from __future__ import annotations

import heapq
import itertools
import random

from lowtide.trace import Constant, Created, Event, OperatorCall, Pin, Release, Trace


def random_trace(seed: int, calls: int = 30) -> Trace:
    """Constants, aliases, operators with several results, writes, releases, random operators and such that run once."""
    draw = random.Random(seed)
    events: list[Event] = [Constant(0, draw.randint(1, 9)), Constant(1, 0)]
    live, constants, count = [0, 1], [0, 1], 2
    for index in range(calls):
        reads = tuple(draw.sample(live, min(len(live), draw.randint(0, 3))))
        creates = [Created(count + i, draw.randint(0, 9)) for i in range(draw.choice((1, 1, 1, 2)))]
        workspace = draw.choice((0, 0, 3))
        if reads and draw.random() < 0.25:
            creates, workspace = [Created(count, 0, draw.choice(reads))], 0
        writes = (draw.choice(reads),) if reads and draw.random() < 0.15 else ()
        if writes and draw.random() < 0.5:
            creates = []
        once = draw.random() < 0.05
        time_ns = draw.randint(0, 9)
        events.append(
            OperatorCall(
                f"op{index}", time_ns, reads, tuple(creates), writes, workspace, random=index % 7 == 0, once=once
            )
        )
        live += [created.tensor for created in creates]
        count += len(creates)
        while len(live) > 6 and draw.random() < 0.8:
            events.append(Release(live.pop(draw.randrange(2, len(live)))))
    events += [Pin(tensor) for tensor in live if tensor not in constants]
    return Trace(tuple(events), f"random {seed}")


def plain_trace(seed: int, calls: int = 6) -> Trace:
    """Operators with one result each, and releases."""
    draw = random.Random(seed)
    events: list[Event] = []
    live: list[int] = []
    for tensor in range(calls):
        reads = tuple(draw.sample(live, min(len(live), draw.randint(0, 2))))
        events.append(OperatorCall(f"op{tensor}", draw.randint(1, 9), reads, (Created(tensor, draw.randint(1, 5)),)))
        live.append(tensor)
        if len(live) > 2 and draw.random() < 0.6:
            events.append(Release(live.pop(draw.randrange(len(live)))))
    return Trace((*events, *(Pin(tensor) for tensor in live)), f"plain {seed}")


def quickest_ns(trace: Trace, budget_bytes: int) -> int | None:
    """The least time within the budget over all evictions and rebuilds at any moment; ``None`` where there is no way.

    For plain traces: Dijkstra's algorithm over (next event, resident tensors).
    """
    calls = {created.tensor: call for call in trace.calls() for created in call.creates}
    sizes = {created.tensor: created.bytes for call in trace.calls() for created in call.creates}
    distance = {(0, frozenset[int]()): 0}
    order = itertools.count()
    queue = [(0, next(order), (0, frozenset[int]()))]
    while queue:
        spent, _, state = heapq.heappop(queue)
        position, there = state
        if spent > distance[state]:
            continue
        if position == len(trace.events):
            return spent
        ways = [(0, (position, there - {tensor})) for tensor in there]
        event = trace.events[position]
        made = {
            created.tensor
            for call in trace.events[:position]
            if isinstance(call, OperatorCall)
            for created in call.creates
        }
        asked = {event.creates[0].tensor} if isinstance(event, OperatorCall) else set()
        for tensor in (made | asked) - there:
            fits = sum(sizes[other] for other in there) + sizes[tensor] <= budget_bytes
            if fits and set(calls[tensor].reads) <= there:
                ways.append((calls[tensor].time_ns, (position + (tensor in asked), there | {tensor})))
        if isinstance(event, Release) or (isinstance(event, Pin) and pinned(trace, position) <= there):
            ways.append((0, (position + 1, there)))
        for time_ns, following in ways:
            if spent + time_ns < distance.get(following, spent + time_ns + 1):
                distance[following] = spent + time_ns
                heapq.heappush(queue, (spent + time_ns, next(order), following))
    return None


def pinned(trace: Trace, position: int) -> set[int]:
    """By the events up to the position."""
    return {event.tensor for event in trace.events[: position + 1] if isinstance(event, Pin)}
