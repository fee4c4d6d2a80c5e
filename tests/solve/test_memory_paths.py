"""The search over full memory states equals brute force."""

from __future__ import annotations

import pytest

from lowtide.ir import Costs, Graph, keep_all_schedule, schedule_from_sequence, simulate
from lowtide.ir.serial import dag_from_json
from lowtide.solve import Problem, Status, minimum_peak, solve
from lowtide.solve.model.compact import compact, released_model
from lowtide.solve.search.memory_paths import Path, cheapest_path
from tests.solve.brute_force import brute_force
from tests.solve.small_graphs import chain, small_graph
from tests.support.overwriting import overwriting


def agrees(seed: int, ops: int) -> None:
    graph, costs = small_graph(seed, ops)
    model = released_model(graph, costs, compact(graph, costs))
    top = simulate(graph, costs, keep_all_schedule(graph)).peak_bytes
    least = brute_force(graph, costs, None)
    assert least is not None
    for budget in {least - 1, least, (least + top) // 2, top - 1}:
        optimum = brute_force(graph, costs, budget)
        path = cheapest_path(model, budget)
        anyone = cheapest_path(model, budget, any_path=True)
        assert path is not None and anyone is not None
        assert path.found == anyone.found == (optimum is not None)
        if optimum is None:
            continue
        result = simulate(graph, costs, schedule_from_sequence(graph, model.sequence(path.nodes), released=True))
        assert result.time_ns == path.time_ns == optimum and result.peak_bytes <= budget
        below = cheapest_path(model, budget, path.time_ns)
        assert below is not None and not below.found


def test_equals_brute_force() -> None:
    for seed in range(300, 420):
        agrees(seed, 4 + seed % 4)


@pytest.mark.slow
def test_equals_brute_force_on_eight_operators() -> None:
    for seed in range(300, 420):
        agrees(seed, 8)


@pytest.mark.parametrize(("seed", "ops"), [(2050, 7), (3855, 9), (4376, 8), (4422, 9), (18462, 8)])
def test_the_least_peak_where_operators_may_write_over_their_inputs(seed: int, ops: int) -> None:
    """What is written over depends on the schedule; views of what is handed over are formed again before that."""
    graph, costs = overwriting(*small_graph(seed, ops), seed)
    peak, schedule = minimum_peak(graph, costs)
    assert simulate(graph, costs, schedule).peak_bytes == peak
    assert solve(Problem(graph, costs, peak)).status.solved
    below = solve(Problem(graph, costs, peak - 1))
    assert not below.status.solved and below.minimum_bytes == peak


def test_gives_up_where_there_are_too_many_states() -> None:
    graph, costs = chain(12)
    assert cheapest_path(compact(graph, costs), 28, states=20) is None


Form = list[tuple[int, int, int, list[int]]]  # (time_ns, bytes, workspace_bytes, inputs) by op


def dag(form: Form, outputs: list[int], fixed_bytes: int = 0) -> tuple[Graph, Costs]:
    ops = [
        {"name": f"op{op}", "time_ns": time_ns, "bytes": size, "workspace_bytes": workspace, "inputs": inputs}
        for op, (time_ns, size, workspace, inputs) in enumerate(form)
    ]
    data = {"format": "lowtide-dag/1", "fixed_bytes": fixed_bytes, "forward_ops": len(ops), "outputs": outputs}
    return dag_from_json(data | {"ops": ops})


def test_eleven_operators_at_the_least_budget() -> None:
    form: Form = [(9, 4096, 8192, []), (9, 4, 8192, [0]), (7, 2048, 0, [1]), (7, 32, 8192, [2]), (8, 1, 0, [3])]
    form += [(9, 512, 8192, [2, 4]), (8, 256, 0, [2, 5]), (7, 2048, 0, [2, 6]), (7, 64, 0, [2, 7]), (9, 4, 0, [2, 8])]
    graph, costs = dag([*form, (7, 1024, 8192, [2, 9])], [0, 3, 4, 5, 7, 8, 10])
    assert solve(Problem(graph, costs, 13859)).status is Status.INFEASIBLE
    for budget, time_ns in ((13860, 133), (13861, 125)):  # from all masks of what is live
        solution = solve(Problem(graph, costs, budget))
        assert (solution.status, solution.time_ns) == (Status.OPTIMAL, time_ns)
    assert minimum_peak(graph, costs)[0] == 13860


def test_thirteen_operators_a_byte_above_the_least() -> None:
    form: Form = [(0, 2, 0, []), (41, 2, 6, [0]), (0, 3, 0, []), (28, 3, 0, [2]), (37, 2, 0, [3]), (28, 2, 6, [1, 2])]
    form += [(9, 2, 6, []), (32, 1, 0, []), (14, 2, 6, [1, 2, 7]), (0, 3, 0, [6]), (0, 1, 6, [4, 9]), (0, 2, 0, [0, 4])]
    graph, costs = dag([*form, (17, 3, 0, [9, 10])], [1, 3, 4, 5, 6, 7, 8, 11, 12], fixed_bytes=7)
    solution = solve(Problem(graph, costs, 27))
    assert (solution.status, solution.time_ns) == (Status.OPTIMAL, 266)


def test_too_many_states_prove_nothing_wrong() -> None:
    graph, costs = chain(200)
    model = compact(graph, costs)
    assert cheapest_path(model, 0) == Path(False)  # what takes more by itself is seen at once
    assert cheapest_path(model, 40, any_path=True, states=2) is None
    path = cheapest_path(model, 100_000)
    assert path is not None and path.found and path.time_ns == model.least_ns
