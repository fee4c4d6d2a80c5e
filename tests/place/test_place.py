"""Placements: never wrong, as low as brute force finds, proven where they say so."""

from __future__ import annotations

import random

import numpy as np
import pytest

from lowtide.errors import PlanError
from lowtide.native import core
from lowtide.place import Buffers, fault, place, placement
from lowtide.place.buffers import sections
from lowtide.place.orders import ORDERS, Rule, order_keys, sorted_by
from lowtide.place.search import luby
from lowtide.solve import Status
from tests.place.instances import filled_rectangle, fits, full_rows, least, overlapping, random_rows
from tests.support.wide import seeds


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_as_low_as_brute_force(seed: int) -> None:
    rows = random_rows(seed, 4 + seed % 4, times=5)
    buffers = Buffers.of(rows, alignment=1 + seed % 3)
    found = place(buffers)
    assert not overlapping(buffers, found.offsets.tolist())
    assert found.reserved_bytes == buffers.reserved_bytes(found.offsets) == least(buffers)
    assert found.status is Status.OPTIMAL
    assert found.lower_bound_bytes == found.reserved_bytes
    assert found.gap == 0.0


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_a_capacity_is_met_or_refuted(seed: int) -> None:
    buffers = Buffers.of(random_rows(seed, 4 + seed % 4, times=5))
    needed = least(buffers)
    assert place(buffers, needed).status is Status.OPTIMAL
    assert place(buffers, needed + 3).reserved_bytes <= needed + 3
    if needed:
        refuted = place(buffers, needed - 1)
        assert refuted.status is Status.INFEASIBLE
        assert len(refuted.offsets) == 0
        assert refuted.lower_bound_bytes == needed <= refuted.reserved_bytes


# Live to the last byte at every time, and still in need of one more.
_NEEDS_MORE = [
    (0, 1, 7), (1, 2, 5), (2, 3, 4), (1, 4, 1), (3, 4, 1), (4, 5, 2), (3, 5, 1), (2, 5, 1), (1, 6, 1), (3, 6, 1), (3, 6, 1),
    (5, 6, 4),
]  # fmt: skip


def test_some_need_more_than_their_load() -> None:
    """What no section shows, the search proves."""
    buffers = Buffers.of(_NEEDS_MORE)
    assert (buffers.load_bytes, least(buffers)) == (7, 8)
    assert place(buffers, 7).status is Status.INFEASIBLE
    found = place(buffers)
    assert (found.status, found.reserved_bytes, found.lower_bound_bytes) == (Status.OPTIMAL, 8, 8)


@pytest.mark.parametrize("height", [5, 7])
def test_what_is_live_to_the_last_byte(height: int) -> None:
    for seed in range(40):
        buffers = Buffers.of(full_rows(seed, 5, height))
        expected = fits(buffers, height)
        assert place(buffers, height).status is (Status.OPTIMAL if expected else Status.INFEASIBLE)


@pytest.mark.parametrize("count", [20, 60, 120])
@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_what_fills_a_capacity_is_placed_in_it(count: int, gap: float) -> None:
    for seed in range(3):
        buffers = Buffers.of(filled_rectangle(seed, count, gap=gap))
        found = place(buffers, 4096)
        assert found.status.solved
        assert fault(buffers, found.offsets) is None
        assert buffers.reserved_bytes(found.offsets) <= 4096


def test_many_buffers_of_all_sizes() -> None:
    """Full to the byte with 300; and 150 large ones with 250 small ones between them, almost down to the bound."""
    full = Buffers.of(filled_rectangle(0, 300, height=1 << 20))
    assert place(full, 1 << 20).status is Status.OPTIMAL
    large = filled_rectangle(1, 200, height=1 << 24, gap=0.25)
    mixed = Buffers.of(large + [(lower * 100, upper * 100, 64 * size) for lower, upper, size in random_rows(2, 250)])
    found = place(mixed, most_visits=10**8)
    assert fault(mixed, found.offsets) is None
    assert mixed.load_bytes <= found.reserved_bytes <= 1.01 * mixed.load_bytes


_STRETCHES = (filled_rectangle(0, 30, height=3000), filled_rectangle(1, 60), [(0, 5, 1), (2, 9, 1)])


def test_what_is_apart_is_placed_apart() -> None:
    """Three stretches of time with nothing between them: the second needs most, and the others no more."""
    rows = [(lower + 1000 * i, upper + 1000 * i, size) for i in range(3) for lower, upper, size in _STRETCHES[i]]
    random.Random(0).shuffle(rows)
    buffers = Buffers.of(rows)
    found = place(buffers)
    assert (found.status, found.reserved_bytes) == (Status.OPTIMAL, 4096)
    assert place(buffers, 4096, start=found.offsets).offsets.tolist() == found.offsets.tolist()
    assert place(buffers, 4095).status is Status.INFEASIBLE
    twice = Buffers.of([*_NEEDS_MORE, *((lower + 10, upper + 10, size) for lower, upper, size in _NEEDS_MORE)])
    assert place(twice, 7).status is Status.INFEASIBLE
    assert (place(twice).reserved_bytes, place(twice).lower_bound_bytes) == (8, 8)


def test_the_same_arguments_give_the_same_offsets() -> None:
    buffers = Buffers.of(filled_rectangle(5, 80, gap=0.05))
    first, second = (place(buffers, seed=3) for _ in range(2))
    assert first.offsets.tolist() == second.offsets.tolist()


def test_larger_units_change_nothing() -> None:
    rows = filled_rectangle(1, 50, gap=0.2)
    small = place(Buffers.of(rows))
    large = place(Buffers.of([(7 * a - 3, 7 * b - 3, 1000 * size) for a, b, size in rows]))
    assert large.reserved_bytes == 1000 * small.reserved_bytes


def test_where_it_ends() -> None:
    buffers = Buffers.of(filled_rectangle(2, 250))
    for limits in ({"most_visits": 1}, {"seconds": 1e-9}):
        found = place(buffers, 4096, **limits)
        assert found.status is Status.UNSOLVED
        assert len(found.offsets) == 0
        assert found.reserved_bytes > 4096
        lowest = place(buffers, **limits)
        assert lowest.status is Status.FEASIBLE
        assert fault(buffers, lowest.offsets) is None
        assert lowest.gap == lowest.reserved_bytes / 4096 - 1 > 0


def test_a_placement_to_start_from() -> None:
    rows = filled_rectangle(3, 40)
    known = place(Buffers.of(rows), 4096).offsets
    again = place(Buffers.of(rows), 4096, start=known, most_visits=0)
    assert again.offsets.tolist() == known.tolist()
    with pytest.raises(PlanError, match="the offsets that are given are no placement: buffers 0 and 1 are both live"):
        place(Buffers.of([(0, 1, 5), (0, 1, 5)]), start=np.zeros(2, np.int64))
    with pytest.raises(PlanError, match="seed is -1"):
        place(Buffers.of(rows), seed=-1)


@pytest.mark.parametrize("count", [210, pytest.param(21_000, marks=pytest.mark.slow)])
def test_more_pairs_than_memory_holds(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_MOST_PAIRS", min(placement._MOST_PAIRS, count**2 // 3))
    crowd = [(0, 2, 1)] * count
    pairs = count * (count - 1) // 2 + count + 1
    with pytest.raises(PlanError, match=f"{pairs} pairs of the {count + 2} buffers are live together"):
        place(Buffers.of([*crowd, (1, 3, 1), (2, 4, 1)]))
    assert place(Buffers.of(crowd)).reserved_bytes == count
    assert place(Buffers.of([(i, i + 1, 1 + i % 3) for i in range(count)])).reserved_bytes == 3


def test_nothing_to_place() -> None:
    assert place(Buffers.of([])).reserved_bytes == 0
    empty = place(Buffers.of([(0, 5, 0), (3, 4, 0)]), 1)
    assert (empty.status, empty.offsets.tolist()) == (Status.OPTIMAL, [0, 0])


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("names", ORDERS)
def test_every_order_and_rule_places_well(rule: Rule, names: tuple[str, ...]) -> None:
    for seed in range(8):
        buffers = Buffers.of([row for row in random_rows(seed, 30, times=20) if row[2]])
        found = sections(buffers)
        native = core.Buffers(found.first, found.last, buffers.padded)
        offsets = native.fit(sorted_by(order_keys(buffers, found), names), rule)
        assert not overlapping(buffers, offsets.tolist())


def test_the_rules_by_hand() -> None:
    """Three blocks with gaps of 3 and 2 between them, made by buffers that are gone when the last one comes."""
    rows = [(0, 9, 1), (0, 5, 3), (0, 9, 1), (0, 5, 2), (0, 9, 1), (5, 9, 2)]
    buffers = Buffers.of(rows)
    found = sections(buffers)
    native = core.Buffers(found.first, found.last, buffers.padded)
    order = np.arange(6, dtype=np.int32)
    assert native.fit(order, Rule.FIRST).tolist() == [0, 1, 4, 5, 7, 1]
    assert native.fit(order, Rule.BEST).tolist() == [0, 1, 4, 5, 7, 5]
    assert native.fit(order[::-1].copy(), Rule.LOWEST).tolist() == [7, 4, 3, 0, 2, 0]


def test_luby() -> None:
    assert [luby(i) for i in range(1, 16)] == [1, 1, 2, 1, 1, 2, 4, 1, 1, 2, 1, 1, 2, 4, 8]


def test_the_search_alone_agrees_with_brute_force() -> None:
    """From orders at random, within every capacity about the least."""
    for seed in range(80):
        draw = random.Random(seed)
        buffers = Buffers.of([row for row in random_rows(seed, 6, times=5, most=4) if row[2]])
        needed, found = least(buffers), sections(buffers)
        native = core.Buffers(found.first, found.last, buffers.padded)
        rank = np.array(draw.sample(range(len(buffers)), len(buffers)), np.int32)
        for capacity in range(needed - 2, needed + 3):
            status, offsets, blame, visits = native.pack(rank, capacity, 10**9, 1e9)
            assert status == (0 if capacity >= needed else 1)
            assert visits > 0
            assert len(blame) == len(buffers)
            if status == 0:
                assert not overlapping(buffers, offsets.tolist())
                assert buffers.reserved_bytes(offsets) <= capacity
