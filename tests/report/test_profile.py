"""Profiles of steps say what the simulators say, span by span."""

from __future__ import annotations

import pytest

from lowtide.ir import Compute, keep_all_schedule, simulate
from lowtide.planning import make_plan
from lowtide.report.profile import profile_of_schedule
from lowtide.report.replay import ENDLESS_BYTES, replay
from lowtide.trace import OperatorCall, ReplayStatus, unconstrained_peak_bytes
from lowtide.trace import simulate as simulate_trace
from tests.support.random_graphs import random_graph
from tests.support.traces import random_trace
from tests.support.wide import seeds


@pytest.mark.parametrize("seed", seeds(6, 12))
def test_levels_are_the_simulators(seed: int) -> None:
    graph, costs = random_graph(seed, 6 + 4 * seed)
    peak = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    plan = make_plan(graph, costs, budget="100%")
    lowest = make_plan(graph, costs, budget=max(plan.curve(points=2).minimum_bytes, 1), planner="auto{effort=1}")
    for schedule in (keep_all_schedule(graph), lowest.schedule):
        run, result = profile_of_schedule(graph, costs, schedule), simulate(graph, costs, schedule)
        steps = [i for i, step in enumerate(schedule.steps) if isinstance(step, Compute)]
        assert run.levels() == result.timeline[steps].tolist()
        assert (run.time_ns, len(run.spans)) == (result.time_ns, len(steps))
        assert run.peak_bytes == max(result.timeline[steps], default=0) <= peak
        assert sum(block.bytes for block in run.at_peak) == run.peak_bytes
        assert run.final_bytes == result.final_bytes
        assert sum(not span.again for span in run.spans) == len(
            {s.op for s in schedule.steps if isinstance(s, Compute)}
        )


@pytest.mark.parametrize("seed", range(8))
def test_replays_are_the_simulators(seed: int) -> None:
    trace = random_trace(seed)
    whole = unconstrained_peak_bytes(trace)
    for budget in (ENDLESS_BYTES, whole, whole * 3 // 4):
        profile, found = replay(trace, budget)
        result = simulate_trace(trace, budget, most_slowdown=None)
        assert found == result
        assert profile.time_ns == result.time_ns
        assert profile.peak_bytes == result.peak_bytes
        assert sum(span.again for span in profile.spans) == result.rematerializations
        if result.status is ReplayStatus.OK:
            names = [span.name for span in profile.spans if not span.again]
            assert names == [event.name for event in trace.events if isinstance(event, OperatorCall)]
