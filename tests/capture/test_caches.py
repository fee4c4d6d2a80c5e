"""All caches of results in the process are found, whatever was made and freed since they were looked for."""

import functools
import gc
import random
from typing import Any

import pytest

from lowtide.capture.python_state.guards import caches
from lowtide.capture.python_state.guards.caches import Caches


def _made() -> Any:
    return functools.lru_cache(lambda: 0)


@pytest.mark.parametrize("seed", range(5))
def test_caches_are_found_that_were_made_since(seed: int) -> None:
    drawn = random.Random(seed)
    Caches()  # what tests before have left
    mine = [_made() for _ in range(3)]
    for _ in range(40):
        for _ in range(drawn.randrange(3)):
            mine.pop(drawn.randrange(len(mine)))
            mine.append(_made())
        if drawn.random() < 0.3:
            mine.append(_made())
        elif len(mine) > 1 and drawn.random() < 0.3:
            mine.pop()
        found = Caches()._misses
        assert all(one in found for one in mine)


def test_objects_are_looked_through_only_where_there_may_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[object] = []
    kept = [_made() for _ in range(3)]
    Caches()

    def counting(*of: object) -> list[Any]:
        searches.append(of)
        return original(*of)

    original = gc.get_referrers
    monkeypatch.setattr(caches.gc, "get_referrers", counting)
    Caches()
    kept.pop()
    Caches()
    assert not searches
    kept.append(_made())
    Caches()
    assert len(searches) == 1
