"""The pool: whom it chooses, what it counts, and that it forgets."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from lowtide.errors import LowtideError
from lowtide.eviction import HEURISTICS, Entry, Pool


def independent(pool: Pool, *sizes: int) -> list[Entry]:
    entries = [Entry(size, 1) for size in sizes]
    for entry in entries:
        pool.enter(entry)
    return entries


@pytest.mark.parametrize(("heuristic", "chosen"), [("lru", 1), ("size", 2), ("msps", 0), ("dtr-local", 1)])
def test_victims(heuristic: str, chosen: int) -> None:
    pool = Pool(heuristic=heuristic)
    entries: list[Entry] = []
    for size, cost_ns in ((4, 1), (2, 2), (8, 90)):
        entries.append(Entry(size, cost_ns, tuple(entries[-1:])))
        pool.enter(entries[-1])
        pool.tick(10)
    pool.touch(entries[0])
    assert pool.victim() is entries[chosen]


def test_pinned_and_locked_entries_stay() -> None:
    pool = Pool(heuristic="size")
    one, two, _empty = independent(pool, 1, 1, 0)
    one.pinned = True
    assert pool.victim() is two
    two.locks = 1
    assert pool.victim() is None


def test_the_earliest_goes_first_among_equals() -> None:
    pool = Pool(heuristic="size")
    entries = independent(pool, 5, 5, 5, 5)
    pool.evict(entries[0])
    pool.add(entries[0])
    order = []
    while (chosen := pool.victim()) is not None:
        order.append(entries.index(chosen))
        pool.evict(chosen)
    assert order == [1, 2, 3, 0]


def test_a_pool_that_was_interrupted_is_what_its_entries_say() -> None:
    pool = Pool(heuristic="dtr")
    chain = [Entry(size, 10) for size in (1, 2, 3)]
    for parent, entry in zip([None, *chain], chain, strict=False):
        entry.parents = () if parent is None else (parent,)
        pool.enter(entry)
    pool.evict(chain[1])
    pool.bytes, chain[0].known_ns, chain[2].position = 77, 5, -1
    pool.recover(chain)
    assert (pool.bytes, list(pool)) == (4, [chain[0], chain[2]])
    assert [pool.neighbourhood_ns(entry) for entry in chain] == [10, 0, 10]
    assert pool.victim() is chain[2]


@pytest.mark.parametrize("sample", [False, True])
def test_only_what_is_allowed_is_chosen(sample: bool) -> None:
    pool = Pool(heuristic="lru", sample=sample)
    entries = independent(pool, *range(1, 101))
    assert pool.victim(lambda entry: entry is entries[70]) is entries[70]
    assert pool.victim(lambda entry: False) is None


def test_small_entries_are_left_out_while_there_are_others() -> None:
    pool = Pool(heuristic="lru", skip_small=True)
    small, large = independent(pool, 1, 1000)
    assert pool.victim() is large
    large.pinned = True
    assert pool.victim() is small
    assert Pool(heuristic="lru").victim() is None


def test_a_sample_does_not_miss_the_only_one_that_can_go() -> None:
    pool = Pool(heuristic="size", sample=True)
    entries = independent(pool, *[8] * 400)
    for entry in entries[:-1]:
        entry.pinned = True
    assert pool.victim() is entries[-1]


def test_a_sample_is_spread_over_all() -> None:
    pool = Pool(heuristic="random", sample=True, seed=1)
    entries = independent(pool, *[1] * 100)
    chosen = {entries.index(entry) for _ in range(2000) if (entry := pool.victim()) is not None}
    assert len(chosen) > 90


def test_bytes_and_states() -> None:
    pool = Pool()
    one, two = independent(pool, 3, 4)
    assert (pool.bytes, one.resident, one.evicted) == (7, True, False)
    pool.evict(one)
    assert (pool.bytes, one.resident, one.evicted) == (4, False, True)
    pool.resize(one, 10)
    pool.resize(two, 0)
    assert pool.bytes == 0
    assert pool.victim() is None
    pool.add(one)
    pool.resize(two, 1)
    assert (pool.bytes, one.resident, one.evicted) == (11, True, False)
    pool.forget(one)
    assert (pool.bytes, one.resident, one.evicted) == (1, False, False)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_the_same_seed_gives_the_same_victims(heuristic: str, sample: bool) -> None:
    def victims() -> list[int]:
        draw = random.Random(3)
        pool = Pool(heuristic=heuristic, sample=sample, seed=5)
        entries: list[Entry] = []
        for index in range(40):
            parents = draw.sample(entries, min(index, draw.randint(0, 2)))
            entries.append(Entry(draw.randint(1, 9), draw.randint(1, 9), tuple(parents)))
            pool.enter(entries[-1])
            pool.tick(entries[-1].cost_ns)
        chosen = []
        while (victim := pool.victim()) is not None:
            chosen.append(entries.index(victim))
            pool.evict(victim)
        return chosen

    assert victims() == victims()
    assert sorted(victims()) == list(range(40))


@pytest.mark.parametrize("heuristic", HEURISTICS)
def test_an_endless_program_leaves_nothing_behind(heuristic: str) -> None:
    """A chain that is evicted and forgotten from its old end: no entry outlives its being forgotten."""
    pool = Pool(heuristic=heuristic, sample=True)
    alive: list[weakref.ref[Entry]] = []
    window = [Entry(1, 1)]
    pool.enter(window[0])
    for step in range(3000):
        entry = Entry(1, 1, (window[-1],))
        alive.append(weakref.ref(entry))
        pool.enter(entry)
        window.append(entry)
        if step % 3 == 0:
            pool.evict(window[len(window) // 2])
        if len(window) > 20:
            pool.victim()
            pool.forget(window.pop(0))
        for between in window[:-1]:
            if between.evicted and step % 7 == 0:
                pool.add(between)
    del entry, between
    gc.collect()
    assert sum(reference() is not None for reference in alive) <= 20
    objects = sum(str(type(thing).__module__).startswith("lowtide.eviction") for thing in gc.get_objects())
    assert objects < 200


def test_unknown_heuristic() -> None:
    with pytest.raises(LowtideError, match="'best'; known: dtr-eq"):
        Pool(heuristic="best")
