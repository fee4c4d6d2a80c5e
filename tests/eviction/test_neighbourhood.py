"""Evicted neighbourhoods against naive computations, under random evictions, rebuilds, changed costs and departures."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator

import pytest

from lowtide.eviction import Entry, Pool
from tests.support.wide import seeds

ENTRIES = 14


def random_pool(seed: int, heuristic: str, *, sample: bool = False, small: bool = False) -> tuple[Pool, list[Entry]]:
    draw = random.Random(seed)
    pool = Pool(heuristic=heuristic, sample=sample, skip_small=small)
    entries: list[Entry] = []
    for index in range(ENTRIES):
        parents = draw.sample(entries, min(index, draw.randint(0, 2)))
        entries.append(Entry(draw.randint(1, 9), draw.randint(1, 9), tuple(parents)))
        pool.enter(entries[-1])
        pool.tick(entries[-1].cost_ns)
    return pool, entries


def walk(pool: Pool, entries: list[Entry], seed: int, steps: int = 60) -> None:
    """Evict and rebuild at random; a rebuild needs its parents."""
    draw = random.Random(seed)
    for _ in range(steps):
        there = [entry for entry in entries if entry.resident]
        if draw.random() < 0.6 and there:
            pool.evict(draw.choice(there))
        ready = [entry for entry in entries if entry.evicted and all(parent.resident for parent in entry.parents)]
        if draw.random() < 0.4 and ready:
            pool.add(draw.choice(ready))


def disturb(pool: Pool, entries: list[Entry], draw: random.Random) -> None:
    """What a live program does besides: costs change, tensors die, can not be rebuilt, or read more."""
    entry = draw.choice(entries)
    match draw.randrange(5):
        case 0:
            pool.charge(entry, draw.randint(1, 9))
        case 1:
            pool.cut(entry)
        case 2:
            pool.forget(entry)
            entries.remove(entry)
        case 3:
            older = entries[: entries.index(entry)]
            pool.link(entry, draw.sample(older, min(len(older), 2)))
        case 4:
            pool.resize(entry, draw.randint(0, 9))


def ancestors(entry: Entry) -> set[Entry]:
    """Evicted, at the end of paths whose every entry after the first is evicted."""
    return {there for parent in entry.parents if parent.evicted for there in (parent, *ancestors(parent))}


def descendants(entry: Entry, everyone: Iterable[Entry]) -> set[Entry]:
    """By their parents alone: ``children`` is the pool's own work."""
    everyone = list(everyone)
    children = [child for child in everyone if entry in child.parents and child.evicted]
    return {there for child in children for there in (child, *descendants(child, everyone))}


def cost_ns(entries: set[Entry]) -> int:
    return sum(entry.cost_ns for entry in entries)


def neighbourhoods(seed: int, heuristic: str) -> Iterator[tuple[int, int]]:
    """Of every resident entry, again and again: what the pool says, and what it is by definition."""
    pool, entries = random_pool(seed, heuristic)
    draw = random.Random(seed)
    for turn in range(15):
        walk(pool, entries, 100 * seed + turn, 4)
        if turn % 2 and len(entries) > 4:
            disturb(pool, entries, draw)
        for entry in entries:
            if entry.resident:
                yield pool.neighbourhood_ns(entry), cost_ns(ancestors(entry) | descendants(entry, entries))


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_exact_neighbourhood_equals_a_naive_one(seed: int) -> None:
    found = list(neighbourhoods(seed, "dtr"))
    assert found and all(said == naive for said, naive in found)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_msps_counts_evicted_ancestors(seed: int) -> None:
    pool, entries = random_pool(seed, "msps")
    draw = random.Random(seed)
    for turn in range(6):
        walk(pool, entries, 100 * seed + turn, 10)
        disturb(pool, entries, draw)
        for entry in entries:
            if entry.resident:
                assert pool.neighbourhood_ns(entry) == cost_ns(ancestors(entry))


@pytest.mark.parametrize("seed", seeds(12, 40))
def test_components_hold_the_exact_neighbourhood(seed: int) -> None:
    """Undirected components are never split, so their cost is at least that of the directed neighbourhood."""
    found = list(neighbourhoods(seed, "dtr-eq"))
    assert found and all(said >= naive for said, naive in found)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_components_are_exact_while_nothing_is_rebuilt(seed: int) -> None:
    pool, entries = random_pool(seed, "dtr-eq")
    draw = random.Random(seed)
    for _ in range(8):
        pool.evict(draw.choice([entry for entry in entries if entry.resident]))
    pool.charge(draw.choice([entry for entry in entries if entry.evicted]), 50)
    for entry in entries:
        if entry.resident:
            component: set[Entry] = set()
            waiting = [entry]
            while waiting:
                here = waiting.pop()
                for neighbour in (*here.parents, *here.children):
                    if neighbour.evicted and neighbour not in component:
                        component.add(neighbour)
                        waiting.append(neighbour)
            assert pool.neighbourhood_ns(entry) == cost_ns(component)


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq", "msps"])
def test_what_all_left_costs_nothing(heuristic: str) -> None:
    """After every eviction has ended nothing is left in any account, whatever the costs have become meanwhile."""
    pool, entries = random_pool(1, heuristic)
    for entry in entries:
        pool.evict(entry)
    for index, entry in enumerate(entries):
        pool.charge(entry, 100 + index)
    for entry in entries:
        pool.add(entry)
    assert [pool.neighbourhood_ns(entry) for entry in entries] == [0] * len(entries)


@pytest.mark.parametrize("heuristic", ["dtr", "dtr-eq"])
def test_long_chains(heuristic: str) -> None:
    """Longer than Python's recursion limit."""
    length = sys.getrecursionlimit() + 200
    pool = Pool(heuristic=heuristic)
    chain = [Entry(1, 1)]
    pool.enter(chain[0])
    for _ in range(length):
        chain.append(Entry(1, 1, (chain[-1],)))
        pool.enter(chain[-1])
    for entry in chain[1:-1]:
        pool.evict(entry)
    assert pool.neighbourhood_ns(chain[-1]) == pool.neighbourhood_ns(chain[0]) == length - 1
    for entry in chain[1:-1]:
        pool.add(entry)
    assert pool.neighbourhood_ns(chain[-1]) == 0
