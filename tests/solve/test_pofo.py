"""The dynamic program over blocks that are kept, run again or moved, and the planner on top of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import PlanError
from lowtide.ir import Compute, Costs, Fetch, Graph, SecondMemory, keep_all_schedule, simulate
from lowtide.solve import Problem, get_planner, solve
from lowtide.solve.block_programs import Rotor
from lowtide.solve.blocks.chain import make_chain
from lowtide.solve.model.compact import compact
from lowtide.solve.moving.chain_table import chain_costs, quickest_way
from tests.solve.block_chains import BlockChain, draw_chain
from tests.solve.brute_force_moves import memory_like

_QUICK = "pofo{slots=100,cells=6}"
_FAST, _NEVER = SecondMemory(2**60, 2**60), SecondMemory(1, 1)


def _chain(seed: int, blocks: int) -> tuple[BlockChain, Graph, Costs]:
    """Bytes and times of a size at which transfers of fractions of a storage are nothing."""
    chain = draw_chain(seed, blocks)
    graph, costs = chain.graph()
    return chain, graph, replace(costs, storage_bytes=costs.storage_bytes * 1000, time_ns=costs.time_ns * 1000)


def _time_ns(chain: BlockChain, graph: Graph, costs: Costs, memory: SecondMemory, budget: int) -> float | None:
    table = Rotor(slots=0).table(make_chain(compact(graph, costs), chain.cuts()), 2 * budget)
    rates = memory.offload_bytes_per_second / 1e9, memory.fetch_bytes_per_second / 1e9
    way = quickest_way(chain_costs(table, budget, rates, 12))
    return None if way is None else way[0]


def _peak(graph: Graph, costs: Costs) -> int:
    return simulate(graph, costs, keep_all_schedule(graph)).peak_bytes


@pytest.mark.parametrize("seed", range(8))
def test_a_link_that_carries_nothing_leaves_rotor(seed: int) -> None:
    chain, graph, costs = _chain(seed, 7)
    peak = _peak(graph, costs)
    table = Rotor(slots=0).table(make_chain(compact(graph, costs), chain.cuts()), 2 * peak)
    backward_ns = 7 * 1000
    for budget in range(peak // 3, peak, 1000):
        rotor = table.time_ns(budget)
        assert _time_ns(chain, graph, costs, _NEVER, budget) == (None if rotor is None else rotor + backward_ns)


@pytest.mark.parametrize("seed", range(8))
def test_a_link_that_takes_no_time_leaves_nothing_to_run_again(seed: int) -> None:
    """Where the peaks of single blocks fit, and only what they need at a time is there."""
    chain, graph, costs = _chain(seed, 7)
    least = max(
        chain.x[i] + chain.a[i] + chain.x[i + 1] + max(0, chain.g[i] + chain.g[i + 1]) for i in range(chain.blocks)
    )
    budget = min(1000 * (least + max(chain.a) + max(chain.x)), _peak(graph, costs) - 1)
    time_ns = _time_ns(chain, graph, costs, _FAST, budget)
    assert time_ns is not None
    assert time_ns <= 1.0001 * int(costs.time_ns.sum())


def test_more_of_the_link_is_never_slower() -> None:
    """With a cell for each state that matters; a schedule for a slow link is one for a quicker one."""
    chain, graph, costs = _chain(3, 6)
    budget = _peak(graph, costs) // 2
    times = []
    for percent in (800, 400, 200, 100, 50, 25):
        time_ns = _time_ns(chain, graph, costs, memory_like(costs, percent), budget)
        assert time_ns is not None
        times.append(time_ns)
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_moving_pays_on_a_long_chain() -> None:
    _, graph, costs = _chain(3, 30)
    costs = replace(costs, second_memory=memory_like(costs, 50))
    budget = _peak(graph, costs) // 4
    rotor, pofo = (solve(Problem(graph, costs, budget), name) for name in ("rotor", _QUICK))
    assert rotor.schedule is not None
    assert pofo.schedule is not None
    assert pofo.time_ns < 0.95 * rotor.time_ns
    assert any(isinstance(step, Fetch) for step in pofo.schedule.steps)
    again = sum(isinstance(step, Compute) for step in pofo.schedule.steps) - len(graph.ops)
    assert again > 0  # both at once
    assert solve(Problem(graph, costs, budget), _QUICK).schedule == pofo.schedule


@pytest.mark.parametrize(("seed", "percent"), [(1, 20), (4, 200)])
def test_auto_is_at_or_under_what_it_starts_from(seed: int, percent: int) -> None:
    _, graph, costs = _chain(seed, 8)
    moving = replace(costs, second_memory=memory_like(costs, percent))
    problem = Problem(graph, moving, int(0.35 * _peak(graph, costs)))
    auto = solve(problem, "auto{effort=1}")
    assert auto.schedule is not None
    assert auto.lower_bound_ns is not None and auto.lower_bound_ns <= auto.time_ns
    others = [solve(problem, name) for name in ("pofo", "rotor", "offload{effort=0}")]
    others.append(solve(replace(problem, costs=costs), "auto{effort=1}"))
    assert auto.time_ns <= min(other.time_ns for other in others if other.schedule is not None)


def test_what_moves_fits_the_second_memory() -> None:
    _, graph, costs = _chain(5, 16)
    budget = _peak(graph, costs) // 3
    memory = memory_like(costs, 20)
    whole = solve(Problem(graph, replace(costs, second_memory=memory), budget), _QUICK)
    assert whole.schedule is not None
    used = simulate(graph, replace(costs, second_memory=memory), whole.schedule).timing.second_peak_bytes
    for room in (0, used // 3):
        small = replace(costs, second_memory=replace(memory, capacity_bytes=room))
        solution = solve(Problem(graph, small, budget), _QUICK)
        assert solution.schedule is not None
        assert simulate(graph, small, solution.schedule).timing.second_peak_bytes <= room


@pytest.mark.parametrize("spec", ["pofo{cells=0}", "pofo{slots=0}", "pofo{blocks=201}"])
def test_options_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(PlanError, match="write for instance"):
        get_planner(spec)
