"""Plans of rebuilds against a simulation of their own, and rebuilds in the least room that there is for them."""

from __future__ import annotations

import functools
import random
from typing import Any, cast

import pytest
import torch

import lowtide
from lowtide.dynamic import context
from lowtide.dynamic.node import Node, OperatorCall
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.orders import OrderCache
from lowtide.dynamic.plan import RebuildPlan, calls_behind, make_plan, with_what_is_there
from tests.online.programs_support import collect
from tests.online.scenarios import interrupted_inside
from tests.support.wide import seeds

KIB = 1024
SEEDS = seeds(5, 40)


@pytest.fixture(autouse=True)
def _no_garbage() -> None:
    """What is freed inside a context is room for it."""
    collect()


def _node(size: int, parents: tuple[Node, ...], call: OperatorCall | None = None, place: int = 0) -> Node:
    node = Node(size, parents)
    node.call = OperatorCall(cast(Any, None), [], {}) if call is None else call
    node.call.results[place] = node
    node.place, node.evicted, node.cost_ns = place, True, 1
    return node


def _program(seed: int, calls: int = 40) -> list[Node]:
    """Random calls with one or two results, some of them in memory still."""
    draw = random.Random(seed)
    nodes: list[Node] = []
    for _ in range(calls):
        parents = tuple(dict.fromkeys(draw.choices(nodes[-8:], k=draw.randint(1, 3)))) if nodes else ()
        first = _node(draw.randint(1, 9), parents)
        nodes.append(first)
        if draw.random() < 0.2:
            nodes.append(_node(draw.randint(1, 9), parents, first.call, 1))
    for node in nodes:
        if draw.random() < 0.25:
            node.evicted, node.resident = False, True
    return nodes


def _simulate(plan: RebuildPlan, targets: list[Node]) -> int:
    """The peak of the plan, every read checked to be there."""
    live = set(plan.given)
    assert all(node.resident for node in live)
    peak = sum(node.size_bytes for node in live)
    for step in plan.steps:
        assert live.issuperset(step.makes[0].parents)
        results = cast("OperatorCall", step.makes[0].call).results.values()
        peak = max(peak, sum(node.size_bytes for node in live) + sum(node.size_bytes for node in results))
        assert live.isdisjoint(step.makes)
        assert live.issuperset(step.done)
        live = (live | set(step.makes)) - set(step.done)
    assert live == set(targets)
    return peak


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_has_the_peak_that_it_says(seed: int) -> None:
    nodes = _program(seed)
    targets = [node for node in nodes[-4:] if not node.resident] or nodes[-1:]
    shallow, shallow_there = calls_behind(targets, lambda call: 0)
    deep, deep_there = calls_behind(targets, lambda call: 0, deep=True)
    for plan in (
        make_plan(shallow, targets, shallow_there),
        make_plan(sorted(shallow), targets, shallow_there),
        make_plan(deep, targets),
        make_plan(sorted(deep), targets, deep_there),
    ):
        assert plan.peak_bytes == _simulate(plan, targets)


@pytest.mark.parametrize("seed", SEEDS)
def test_orders_make_do_with_less(seed: int) -> None:
    """What is found within the room fits; holding more of what is there on top never leaves it and never costs calls."""
    nodes = _program(seed)
    targets = nodes[-2:]
    calls, there = calls_behind(targets, lambda call: 0, deep=True)
    calls.sort()
    orders = OrderCache()
    all_bytes = make_plan(calls, targets).peak_bytes
    for room in (all_bytes, all_bytes * 3 // 4, all_bytes // 2):
        order = orders.within(room, calls, targets)
        assert order == orders.within(room, calls, targets)
        bare = make_plan(order, targets)
        held = with_what_is_there(order, targets, there, room)
        assert bare.peak_bytes == _simulate(bare, targets)
        assert held.peak_bytes == _simulate(held, targets) <= max(room, bare.peak_bytes)
        assert len(held.steps) <= len(bare.steps)
        assert room < all_bytes or held.peak_bytes <= room


def test_what_is_found_for_a_structure_is_found_for_its_like() -> None:
    """The same program again, of other nodes: the same order."""
    orders = OrderCache()
    places = []
    for _ in range(2):
        nodes = _program(3)
        calls = sorted(calls_behind(nodes[-2:], lambda call: 0, deep=True)[0])
        room = make_plan(calls, nodes[-2:]).peak_bytes // 2
        places.append([calls.index(call) for call in orders.within(room, calls, nodes[-2:])])
    assert places[0] == places[1]
    assert len(orders) == 1


def _deep_pyramid(height: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Each tensor from the two before it, so that everything hangs together; 1 KiB each."""
    tensors = [torch.arange(256.0), torch.ones(256)]
    while len(tensors) < height:
        tensors.append(torch.sin(tensors[-1]) + tensors[-2] * 0.5)
    return tensors[-1], tensors


@pytest.mark.parametrize("policy", ["eager", "ignore"])
def test_operands_far_apart_in_little_room(policy: str) -> None:
    """Sums over a long recurrence, first with last, where hardly more than operands and result fit."""
    _, expected = _deep_pyramid(60)
    sums = [(expected[index] + expected[-1 - index]).sum().item() for index in range(30)]
    session = lowtide.online(5 * KIB + 512, policy=policy, warn_above=float("inf"))
    with session:
        _, tensors = _deep_pyramid(60)
        assert [(tensors[index] + tensors[-1 - index]).sum().item() for index in range(30)] == sums
        assert session.statistics.peak_bytes <= 5 * KIB + 512
    assert all(map(torch.equal, tensors, expected))


def _sum_far_apart(tensors: list[torch.Tensor]) -> None:
    for index in range(30):
        (tensors[index] + tensors[-1 - index]).sum().item()


@functools.cache
def _lines_of_rebuilds() -> int:
    """How many lines of the engine the sums run: as many moments at which they can be interrupted."""
    for _ in range(2):  # the first run may make what is kept for the process
        with lowtide.online(5 * KIB + 512, warn_above=float("inf")):
            _, tensors = _deep_pyramid(60)
            with interrupted_inside("lowtide.dynamic") as lines:
                _sum_far_apart(tensors)
    return lines[0]


@pytest.mark.parametrize("part", range(3))
def test_interrupt_anywhere_in_a_rebuild(part: int) -> None:
    """Whatever was half done, all that the program holds is as it was."""
    _, expected = _deep_pyramid(60)
    lines = _lines_of_rebuilds()
    moments = range(1 + part * lines // 3, (part + 1) * lines // 3, lines // 13)
    struck = 0
    for events in moments:
        with lowtide.online(5 * KIB + 512, warn_above=float("inf")) as session:
            _, tensors = _deep_pyramid(60)
            try:
                with interrupted_inside("lowtide.dynamic", events):
                    _sum_far_apart(tensors)
            except KeyboardInterrupt:
                struck += 1
            except RuntimeError as error:  # it struck where C++ had asked for room and cannot carry it
                assert "can't allocate memory" in str(error)
                struck += 1
            assert session.statistics.peak_bytes <= 5 * KIB + 512
        assert all(map(torch.equal, tensors, expected))
    assert struck == len(moments) > 3


def _small_behind_large() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A small tensor made of a large one, and 12 KiB that cannot be evicted, as NumPy has seen them."""
    small = torch.cat([torch.arange(256.0)] * 10).view(10, 256).sum(0)
    fixed = [torch.full((256,), float(index)) for index in range(12)]
    for tensor in fixed:
        tensor.numpy()
    return small, fixed


def test_a_rebuild_that_cannot_fit_is_refused_with_what_it_takes() -> None:
    budget = 12 * KIB + 512
    with lowtide.online(budget):
        small, fixed = _small_behind_large()
        with pytest.raises(lowtide.OnlineBudgetError, match="evicted") as caught:
            small + 1
        assert caught.value.budget_bytes == budget
        assert 23 * KIB <= caught.value.needed_bytes <= 24 * KIB
        del fixed
        assert torch.equal(small + 1, torch.arange(256.0) * 10 + 1)
    with lowtide.online(caught.value.needed_bytes) as session:
        small, _fixed = _small_behind_large()
        assert torch.equal(small + 1, torch.arange(256.0) * 10 + 1)
        assert session.statistics.peak_bytes <= caught.value.needed_bytes


def test_scratch_that_no_plan_knew_of_is_planned_for() -> None:
    """The call takes more than its result: the rebuild fails at first, and is planned again with what it takes."""

    def small() -> torch.Tensor:
        return torch.logsumexp(torch.arange(1024.0).view(4, 256), 0)

    expected = small() + 1
    with lowtide.online(12 * KIB + 512):
        result = small()
        fixed = [torch.full((256,), float(index)) for index in range(6)]
        filling = [torch.full((256,), float(index)) for index in range(6)]
        for tensor in (*fixed, *filling):
            tensor.numpy()
        del filling, tensor
        with pytest.raises(lowtide.OnlineBudgetError, match="evicted") as caught:
            result + 1
        assert 14 * KIB <= caught.value.needed_bytes <= 16 * KIB
        del fixed
        assert torch.equal(result + 1, expected)


def test_orders_that_were_found_are_there_when_a_context_is_entered_again() -> None:
    """As around every step of a training loop; also where the least that was found does not fit."""
    session, kept = lowtide.online(4 * KIB + 512, planning="never", warn_above=float("inf")), []
    for _ in range(2):
        with session:
            assert context._run is not None
            kept.append(len(context._run.engine.rebuilder.orders))
            _, tensors = _deep_pyramid(60)
            with pytest.raises(lowtide.OnlineBudgetError):
                _sum_far_apart(tensors)
            del tensors, _  # which would make room in the next one
    assert kept[0] == 0 < kept[1]


def test_what_is_let_go_of_while_it_is_rebuilt() -> None:
    """What a step reads was there when the rebuild was planned, and could not be evicted."""
    with lowtide.online(64 * KIB, planning="never", warn_above=float("inf")):
        assert context._run is not None
        engine = context._run.engine
        memory, start = engine.memory, torch.arange(256.0)
        first = start * 2
        second = first + 1
        third = second * 3
        node = {
            name: memory.node_of(tensor) for name, tensor in (("first", first), ("second", second), ("third", third))
        }
        del second
        memory.release_dead()
        plan = make_plan(calls_behind([node["third"]], lambda call: 0, deep=True)[0], [node["third"]])
        assert [step.makes for step in plan.steps[-3:]] == [(node["first"],), (node["second"],), (node["third"],)]
        memory.evict(node["third"])
        node["first"].pinned = True
        del first
        assert engine.rebuilder._follow(plan)
        assert torch.equal(third, (torch.arange(256.0) * 2 + 1) * 3)
        assert not any(each.locks for each in node.values())


@pytest.mark.parametrize("name", ["_cudnn_rnn", "miopen_rnn"])
@pytest.mark.parametrize(
    ("probability", "training", "again"), [(0.0, True, True), (0.5, False, True), (0.5, True, False)]
)
def test_layers_that_draw_masks_of_their_own_run_once(
    name: str, probability: float, training: bool, again: bool
) -> None:
    """No generator tells which masks cuDNN's layers drew between them."""
    overload = getattr(torch.ops.aten, name).default
    values = {"dropout": probability, "train": training}
    args = [values.get(argument.name) for argument in overload._schema.arguments]
    assert Operator(overload).can_repeat(args, torch.device("cpu")) is again
