"""The simulator on small traces: the budget, what each policy does, writes, and the quickest way found by brute force."""

from __future__ import annotations

import pytest

from lowtide.errors import LowtideError
from lowtide.eviction import HEURISTICS
from lowtide.trace import (
    POLICIES,
    Constant,
    Created,
    Event,
    OperatorCall,
    Pin,
    Release,
    ReplayResult,
    ReplayStatus,
    Trace,
    simulate,
    unconstrained_peak_bytes,
)
from tests.support.traces import plain_trace, quickest_ns, random_trace


def call(name: str, reads: tuple[int, ...] = (), *creates: tuple[int, int], **options: object) -> OperatorCall:
    """Takes 10 ns."""
    return OperatorCall(name, 10, reads, tuple(Created(*pair) for pair in creates), **options)  # type: ignore[arg-type]


def replay(*events: Event, budget: int, policy: str = "eager", heuristic: str = "lru") -> ReplayResult:
    return simulate(Trace(events), budget, heuristic, policy=policy, most_slowdown=None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_budget_holds_and_results_are_reproducible(heuristic: str, policy: str) -> None:
    for seed in range(25):
        trace = random_trace(seed)
        peak = unconstrained_peak_bytes(trace)
        for share in (100, 70, 50, 30):
            budget = peak * share // 100
            options = {"policy": policy, "seed": seed}
            result = simulate(trace, budget, heuristic, sample=bool(seed % 2), most_slowdown=50, **options)  # type: ignore[arg-type]
            again = simulate(trace, budget, heuristic, sample=bool(seed % 2), most_slowdown=50, **options)  # type: ignore[arg-type]
            assert result == again
            assert result.peak_bytes <= budget
            assert result.status is not ReplayStatus.OK or result.time_ns >= trace.time_ns
            assert (result.operator == "") == (result.status is ReplayStatus.OK)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_evicted_where_there_is_room(policy: str) -> None:
    for seed in range(25):
        trace = random_trace(seed)
        result = simulate(trace, 10**9, policy=policy, most_slowdown=None)
        assert (result.status, result.evictions) == (ReplayStatus.OK, 0)


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_never_quicker_than_the_quickest_way(heuristic: str) -> None:
    for seed in range(30):
        trace = plain_trace(seed)
        for share in (100, 80, 60):
            budget = unconstrained_peak_bytes(trace) * share // 100
            least = quickest_ns(trace, budget)
            for policy in POLICIES:
                result = simulate(trace, budget, heuristic, policy=policy, most_slowdown=None)
                assert result.status is ReplayStatus.OUT_OF_MEMORY or (least is not None and result.time_ns >= least)
            if share == 100:
                assert simulate(trace, budget, heuristic).time_ns == least == trace.time_ns


def test_evictions_are_rebuilt_with_what_they_need() -> None:
    """a -> b -> c, room for two: to read b again, a is computed again too."""
    events = (call("a", (), (0, 4)), call("b", (0,), (1, 4)), call("c", (), (2, 4)), call("d", (), (3, 4)))
    result = replay(*events, call("e", (1,), (4, 0)), budget=8)
    assert (result.evictions, result.rematerializations, result.time_ns) == (4, 2, 70)
    assert (result.peak_bytes, result.base_ns, result.slowdown) == (8, 50, 1.4)


def test_eager_eviction_makes_room_in_time() -> None:
    """What was released goes before what is held, whatever the heuristic would say."""
    events = (call("a", (), (0, 1)), call("b", (), (1, 8)), Release(0), call("c", (), (2, 1)), Pin(1))
    for policy in POLICIES:
        result = replay(*events, budget=9, policy=policy, heuristic="size")
        assert result.status is ReplayStatus.OK
        assert (result.evictions > 0) == (policy == "ignore")


def test_banished_storages_never_return() -> None:
    """b was computed from a; once a is banished b stays, so that there is no room for c."""
    events = (call("a", (), (0, 4)), call("b", (0,), (1, 4)), Release(0), call("c", (), (2, 8)), Release(2), Pin(1))
    for policy in ("eager", "ignore"):
        result = replay(*events, budget=8, policy=policy)
        assert (result.status, result.rematerializations) == (ReplayStatus.OK, 2)
    assert replay(*events, budget=8, policy="banish").status is ReplayStatus.OUT_OF_MEMORY
    assert replay(*events, budget=12, policy="banish").status is ReplayStatus.OK


def test_banishing_waits_for_what_is_evicted() -> None:
    """b is evicted when a is released: a stays until b has been rebuilt, and goes then."""
    events = (
        call("a", (), (0, 4)),
        call("b", (0,), (1, 4)),
        call("c", (0,), (2, 8)),
        Release(0),
        Release(2),
        call("d", (1,), (3, 4)),
        call("e", (), (4, 4)),
    )
    result = replay(*events, budget=12, policy="banish")
    assert (result.status, result.rematerializations, result.peak_bytes) == (ReplayStatus.OK, 1, 12)


def test_an_alias_is_defined_again_by_its_own_operator() -> None:
    """Base and alias share 4 bytes; reading the alias after their eviction runs both operators."""
    view = OperatorCall("view", 10, (0,), (Created(1, 0, 0),))
    result = replay(call("a", (), (0, 4)), view, call("b", (), (2, 4)), call("c", (1,), (3, 0)), budget=4)
    assert (result.status, result.evictions, result.rematerializations) == (ReplayStatus.OK, 2, 2)


def test_a_result_that_is_there_is_there_twice_while_its_operator_runs_again() -> None:
    """Of a pair, one is evicted and read again; the other is locked by being read as well."""
    pair = call("pair", (), (0, 4), (1, 2))
    both = call("both", (0, 1), (3, 0))
    events = (pair, call("b", (), (2, 4)), both)
    assert replay(*events, budget=9, heuristic="size").peak_bytes == 8
    assert replay(*events, budget=7, heuristic="size").status is ReplayStatus.OUT_OF_MEMORY


def test_a_write_leaves_a_version_that_is_rebuilt_from_the_old_one() -> None:
    write = call("relu_", (0,), writes=(0,))
    events = (call("a", (), (0, 4)), write, call("b", (), (1, 8)), Release(1), call("c", (0,), (2, 0)))
    result = replay(*events, budget=8)
    assert (result.status, result.rematerializations) == (ReplayStatus.OK, 2)
    assert replay(*events, budget=7).status is ReplayStatus.OUT_OF_MEMORY


def test_aliases_look_at_the_new_version() -> None:
    """The alias is read after the write: that needs the written version, not only what the alias was made from."""
    view = OperatorCall("view", 10, (0,), (Created(1, 0, 0),))
    write = call("relu_", (0,), writes=(0,))
    events = (call("a", (), (0, 4)), view, write, call("b", (), (2, 8)), Release(2), call("c", (1,), (3, 0)))
    assert replay(*events, budget=8).rematerializations == 3  # a, relu_, and the alias, now of the new version


def test_a_constant_is_written_in_place_after_what_needs_its_old_content() -> None:
    """b is evicted and held when the constant changes: it is rebuilt before, and stays."""
    update = call("add_", (0,), writes=(0,))
    events = (Constant(0, 4), call("b", (0,), (1, 4)), call("c", (), (2, 8)), Release(2), update, Pin(1))
    result = replay(*events, budget=12)
    assert (result.status, result.rematerializations, result.peak_bytes) == (ReplayStatus.OK, 1, 12)
    late = (*events, call("d", (), (3, 8)))
    assert replay(*late, budget=12).status is ReplayStatus.OUT_OF_MEMORY


def test_many_steps_of_training_leave_nothing_behind() -> None:
    """Forward, backward and an update of the weights in place, again and again: the hundredth step needs what the first did."""

    def steps(count: int) -> Trace:
        events: list[Event] = [Constant(0, 4), Constant(1, 4)]
        for step in range(count):
            first = 2 + 6 * step
            a, b, c, grad_c, grad_b, grad_a = range(first, first + 6)
            events += [call("f", (0,), (a, 4)), call("f", (a, 1), (b, 4)), call("f", (b, 0), (c, 4))]
            events += [call("g", (c,), (grad_c, 4)), Release(c), call("g", (grad_c, b), (grad_b, 4)), Release(grad_c)]
            events += [Release(b), call("g", (grad_b, a, 1), (grad_a, 4)), Release(a)]
            events += [call("step_", (0, grad_a), writes=(0,)), call("step_", (1, grad_b), writes=(1,))]
            events += [Release(grad_a), Release(grad_b)]
        return Trace(tuple(events))

    for policy in POLICIES:
        for heuristic in ("lru", "size", "dtr-eq", "dtr"):
            for budget in (20, 24):
                one, many = (simulate(steps(n), budget, heuristic, policy=policy) for n in (2, 100))
                assert one.status is many.status
                assert many.peak_bytes == one.peak_bytes
                assert many.rematerializations <= 50 * max(one.rematerializations, 2)


def test_what_runs_once_is_never_evicted_while_held() -> None:
    once = call("draw", (), (0, 4), once=True)
    assert replay(once, call("b", (), (1, 8)), call("c", (0,), (2, 0)), budget=8).status is ReplayStatus.OUT_OF_MEMORY
    assert replay(once, Release(0), call("b", (), (1, 8)), budget=8).status is ReplayStatus.OK
    again = call("draw", (), (0, 4), random=True)
    assert replay(again, call("b", (), (1, 8)), call("c", (0,), (2, 0)), budget=8).rematerializations == 1


def test_a_workspace_needs_room_while_its_operator_runs() -> None:
    events = (call("a", (), (0, 4)), call("b", (), (1, 4), workspace_bytes=2))
    assert replay(*events, budget=9).evictions == 1
    assert replay(*events, budget=10).peak_bytes == 10


def test_thrashing_ends_the_replay() -> None:
    network = [call("a", (), (0, 4)), call("b", (), (1, 4))]
    network += [call("c", (index % 2,), (2 + index, 0)) for index in range(50)]
    result = simulate(Trace(tuple(network)), 4, "lru", most_slowdown=1.5)
    assert (result.status, result.operator) == (ReplayStatus.THRASH, "a")
    assert result.time_ns <= 2 * result.base_ns


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq", "lru"])
def test_a_chain_longer_than_the_recursion_limit_is_rebuilt(heuristic: str) -> None:
    length = 1500
    events: list[Event] = [call("f", (i - 1,) if i else (), (i, 1)) for i in range(length)]
    events += [Release(i) for i in range(length - 1)]
    events += [call("large", (), (length, 2)), Release(length), call("last", (length - 1,), (length + 1, 0))]
    result = simulate(Trace(tuple(events)), 2, heuristic, most_slowdown=None)
    assert (result.status, result.rematerializations) == (ReplayStatus.OK, length)


def test_errors() -> None:
    with pytest.raises(LowtideError, match="no policy is named 'never'; known: eager, ignore, banish"):
        replay(budget=1, policy="never")
    with pytest.raises(LowtideError, match="event 0 of the trace: x reads %5, which was never made"):
        replay(call("x", (5,)), budget=1)
