"""Caches of the user's program that would keep fake tensors alive.

A model may build a constant in a function under ``functools.lru_cache`` (BEiT's relative positions). Traced, the cache
keeps a fake tensor, which the tracer's next pass, and the user's next eager call, would be handed. Caches that hold fake
tensors are cleared: what tracing put there goes, and the entries beside it are made again when asked for.

A method under ``functools.cache`` keeps its results by the object it belongs to. Traced, that is a copy: eager's calls find the
result of the first one, however the object has changed since, and a capture never does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from lowtide.capture.python_state.code.installed import is_library
from lowtide.capture.trace.patches import replaced
from lowtide.errors import CaptureError
from lowtide.objects.walk import PLAIN

_CACHE = type(functools.lru_cache(len))
_NO_RESULT = (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType, torch.Tensor)  # or one that is no object
_DEPTH = 3  # from the cache through its entry to a tensor, or to a container of tensors


class Results:
    """The objects that a cache holds. Called: whether it has not been cleared since, and which of them it holds still, but for
    numbers, texts and tensors."""

    def __init__(self, cache: Any) -> None:
        self.cache, self._misses = cache, cache.cache_info().misses
        self.then = self._results()
        self._plain: tuple[Any, ...] = ()

    def __call__(self) -> tuple[Any, ...]:
        held = {*map(id, self._held())} if self.then or self._plain else ()
        filled = self.cache.cache_info().misses >= self._misses and all(id(one) in held for one in self._plain)
        return filled, *(one for one in self.then if id(one) in held)

    def settle(self) -> None:
        """It is to hold all that it does now, numbers and texts as well, unless it drops those by itself."""
        size, most = self.cache.cache_info().currsize, self.cache.cache_info().maxsize
        self._misses = self.cache.cache_info().misses
        self._plain = tuple(self._all(PLAIN)) if most is None or size < most else ()

    @property
    def are_more(self) -> bool:
        """Whether others have come since."""
        return not {*map(id, self._results())} <= {*map(id, self.then)}

    def arguments(self) -> Iterator[Any]:
        """That it keeps results for."""
        for key in self._table():
            yield from key if isinstance(key, tuple) else (key,)

    def _table(self) -> dict[Any, Any]:
        """By their arguments, the results, or links to them in a cache of limited size, which refers to results itself."""
        own = self.cache.__dict__
        return [one for one in gc.get_referents(self.cache) if type(one) is dict and one is not own][-1]

    def _held(self) -> list[Any]:
        return [*gc.get_referents(self.cache), *self._table().values()]

    def _results(self) -> tuple[Any, ...]:
        found = (one for one in self._all(object) if not isinstance(one, _NO_RESULT))
        return tuple(one for one in found if type(one).__qualname__ not in ("object", "_lru_list_elem"))

    def _all(self, kinds: Any) -> Iterator[Any]:
        own, table = self.cache.__dict__, self._table()
        beside = {*map(id, (own, table, *own.values(), *table))}
        return (one for one in self._held() if id(one) not in beside and isinstance(one, kinds))


def refuse_kept_for(copies: Mapping[int, Any], caches: Iterable[Results]) -> None:
    """Raises ``CaptureError`` where one keeps a result for one of the ``copies`` (by their ids) or for a tensor of the
    tracer's: for the original there may be another one. Objects that are equal to their copies find those of their copies."""
    for results in caches:
        for one in results.arguments():
            copied = id(one) in copies and type(one).__hash__ is object.__hash__  # type: ignore[comparison-overlap]
            if copied or isinstance(one, (FakeTensor, FunctionalTensor)):
                raise CaptureError(
                    f"{results.cache.__qualname__} keeps its result for a {type(one).__name__} (functools.cache or lru_cache), "
                    "which planned calls would not look up: keep it in an attribute, or give the function numbers and texts."
                )


def is_cache(value: Any) -> bool:
    """Whether it is a cached function of the user's."""
    return type(value) is _CACHE and not is_library(value)


class _Noting(type):
    """Of what stands in the place of the type of caches, for ``isinstance`` too: Dynamo asks."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _CACHE)


class _Found:
    """Every ``functools.lru_cache`` in the process, that has lived at the latest search."""

    def __init__(self) -> None:
        self._links: list[weakref.ref[Any]] = []
        self._others = -1  # what else refers to their type

    def all(self) -> list[Any]:
        """Looking at all objects of the process takes long. Each cache refers to its type: where as many do as before beside
        those that are known, there are no others, unless as many of these ended at the same time (in frames of a traceback)."""
        known = [one for link in self._links if (one := link()) is not None]
        if sys.getrefcount(_CACHE) - len(known) != self._others:
            found = {id(one): one for one in gc.get_referrers(_CACHE) if type(one) is _CACHE}  # none of frozen ones
            known = [*({id(one): one for one in known} | found).values()]
            self._links = [weakref.ref(one) for one in known]
            self._others = sys.getrefcount(_CACHE) - len(known)
        return known


_FOUND = _Found()


class Caches:
    """Every ``functools.lru_cache`` in the process."""

    def __init__(self) -> None:
        self._misses = {one: one.cache_info().misses for one in _FOUND.all()}

    @contextlib.contextmanager
    def without_fakes(self, reached: Mapping[int, Results] = MappingProxyType({})) -> Iterator[None]:
        """After what runs inside, those are cleared that it has given fake tensors to hold. ``reached``: what it comes to, of
        which some may have been frozen with all other objects of the process (``gc.freeze``)."""
        try:
            with replaced(functools, "_lru_cache_wrapper", self.made):
                yield
        finally:
            for results in reached.values():
                self._misses.setdefault(results.cache, -1)
            for one, before in self._misses.items():
                if one.cache_info().misses != before:  # few of some thousands
                    if _holds_fake(one, _DEPTH):
                        one.cache_clear()
                    self._misses[one] = one.cache_info().misses

    @property
    def made(self) -> type:
        """Those that are made now, in the place of functools' own type."""

        def new(_: type, *args: Any) -> Any:
            one = _CACHE(*args)
            self._misses[one] = 0
            return one

        return _Noting(_CACHE.__name__, (), {"__new__": new})


def _holds_fake(holder: Any, depth: int) -> bool:
    for child in gc.get_referents(holder):
        if isinstance(child, torch.Tensor):
            if isinstance(child, (FakeTensor, FunctionalTensor)):
                return True
            continue
        container = isinstance(child, (list, tuple, dict)) or type(child).__name__ == "_lru_list_elem"
        if depth and container and _holds_fake(child, depth - 1):
            return True
    return False
