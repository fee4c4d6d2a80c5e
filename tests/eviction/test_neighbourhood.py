"""Evicted neighbourhoods against naive computations, under random evictions and rebuilds."""

from __future__ import annotations

import random

import pytest

from lowtide.errors import PlanError
from lowtide.eviction import HEURISTICS, Pool
from lowtide.eviction.neighbourhood import Connected, Exact


def random_pool(seed: int, storages: int = 14, **options: object) -> Pool:
    draw = random.Random(seed)
    parents = [sorted(draw.sample(range(s), min(s, draw.randint(0, 2)))) for s in range(storages)]
    sizes = [draw.randint(1, 9) for _ in range(storages)]
    pool = Pool(sizes, [draw.randint(1, 9) for _ in range(storages)], parents, **options)  # type: ignore[arg-type]
    for storage in range(storages):
        pool.add(storage)
        pool.tick(pool.cost_ns[storage])
    return pool


def reached(pool: Pool, storage: int, edges: list[list[int]] | list[tuple[int, ...]]) -> set[int]:
    """Evicted storages at the end of paths whose every node after the first is evicted."""
    found: set[int] = set()
    for neighbour in edges[storage]:
        if pool.evicted[neighbour] and neighbour not in found:
            found |= {neighbour} | reached(pool, neighbour, edges)
    return found


def walk(pool: Pool, seed: int, steps: int = 60) -> None:
    """Evict and rebuild at random; a rebuild needs its parents."""
    draw = random.Random(seed)
    for _ in range(steps):
        if draw.random() < 0.6 and pool.resident:
            pool.evict(draw.choice(list(pool.resident)))
        ready = [s for s, gone in enumerate(pool.evicted) if gone and all(p in pool.resident for p in pool.parents[s])]
        if draw.random() < 0.4 and ready:
            pool.add(draw.choice(ready))


@pytest.mark.parametrize("seed", range(40))
def test_exact_neighbourhood_equals_a_naive_one(seed: int) -> None:
    pool = random_pool(seed, heuristic="dtr")
    for turn in range(15):
        walk(pool, 100 * seed + turn, 4)
        for storage in pool.resident:
            around = reached(pool, storage, pool.parents) | reached(pool, storage, pool.children)
            assert pool._around.cost_ns(storage) == sum(pool.cost_ns[s] for s in around)


@pytest.mark.parametrize("seed", range(20))
def test_msps_counts_evicted_ancestors(seed: int) -> None:
    pool = random_pool(seed, heuristic="msps")
    walk(pool, seed)
    for storage in pool.resident:
        ancestors = reached(pool, storage, pool.parents)
        assert pool._around.cost_ns(storage) == sum(pool.cost_ns[s] for s in ancestors)


@pytest.mark.parametrize("seed", range(40))
def test_components_hold_the_exact_neighbourhood(seed: int) -> None:
    """Undirected components are never split, so their cost is at least that of the directed neighbourhood."""
    pool = random_pool(seed, heuristic="dtr-eq")
    exact = Exact(pool)
    for turn in range(15):
        walk(pool, 100 * seed + turn, 4)
        exact.known.clear()
        for storage in pool.resident:
            assert pool._around.cost_ns(storage) >= exact.cost_ns(storage)


@pytest.mark.parametrize("seed", range(20))
def test_components_are_exact_while_nothing_is_rebuilt(seed: int) -> None:
    pool = random_pool(seed, heuristic="dtr-eq")
    assert isinstance(pool._around, Connected)
    draw = random.Random(seed)
    for _ in range(8):
        pool.evict(draw.choice(list(pool.resident)))
    for storage in pool.resident:
        component: set[int] = set()
        waiting = [storage]
        while waiting:
            here = waiting.pop()
            for neighbour in (*pool.parents[here], *pool.children[here]):
                if pool.evicted[neighbour] and neighbour not in component:
                    component.add(neighbour)
                    waiting.append(neighbour)
        assert pool._around.cost_ns(storage) == sum(pool.cost_ns[s] for s in component)


def test_victims() -> None:
    def victim(heuristic: str) -> int | None:
        pool = Pool([4, 2, 8], [1, 2, 90], [(), (0,), (1,)], heuristic=heuristic)
        for storage in range(3):
            pool.add(storage)
            pool.tick(10)
        pool.touch(0)
        return pool.victim()

    assert victim("lru") == 1
    assert victim("size") == 2
    assert victim("msps") == 0
    assert victim("dtr-local") == 1


def test_pinned_and_locked_storages_stay() -> None:
    pool = Pool([1, 1, 0], [1, 1, 1], [(), (), ()], heuristic="size")
    for storage in range(3):
        pool.add(storage)
    pool.pinned[0] = True
    assert pool.victim() == 1
    pool.locks[1] = 1
    assert pool.victim() is None


@pytest.mark.parametrize("heuristic", HEURISTICS)
@pytest.mark.parametrize("sample", [False, True])
def test_the_same_seed_gives_the_same_victims(heuristic: str, sample: bool) -> None:
    def victims() -> list[int | None]:
        pool = random_pool(3, heuristic=heuristic, sample=sample)
        chosen = []
        for _ in range(6):
            chosen.append(pool.victim())
            assert chosen[-1] is not None
            pool.evict(chosen[-1])
        return chosen

    assert victims() == victims()


def test_unknown_heuristic() -> None:
    with pytest.raises(PlanError, match="'best'; known: dtr-eq"):
        Pool([1], [1], [()], heuristic="best")
