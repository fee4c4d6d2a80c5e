"""Handle ``functools`` caches in the user's program: clear fake tensors from them, and guard the results that they hold.

A model may build a constant in a function under ``functools.lru_cache`` (BEiT's relative positions). In a trace, the cache
keeps a fake tensor, which the next trace, and the user's next eager call, would get. So caches that hold fake tensors are
cleared after a trace; their other entries are recomputed on demand.

A method under ``functools.cache`` keeps its results by the object it belongs to. In a trace that object is a copy: an eager
call finds the first call's result, however the object has changed since, but a capture never does.
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
_NO_RESULT = (*PLAIN, type, types.FunctionType, types.BuiltinFunctionType, torch.Tensor)  # not tracked as results
_DEPTH = 3  # from the cache through its entry to a tensor, or to a container of tensors


class Results:
    """The results that a cache held at construction. Calling it returns whether the cache has not been cleared since, and which
    of these objects it still holds (not numbers, texts and tensors)."""

    def __init__(self, cache: Any) -> None:
        self.cache, self._misses = cache, cache.cache_info().misses
        self.then = self._results()
        self._plain: tuple[Any, ...] = ()

    def __call__(self) -> tuple[Any, ...]:
        held = {*map(id, self._held())} if self.then or self._plain else ()
        filled = self.cache.cache_info().misses >= self._misses and all(id(one) in held for one in self._plain)
        return filled, *(one for one in self.then if id(one) in held)

    def settle(self) -> None:
        """From now on expect all current results, numbers and texts included, unless the cache is full and may evict them."""
        size, most = self.cache.cache_info().currsize, self.cache.cache_info().maxsize
        self._misses = self.cache.cache_info().misses
        self._plain = tuple(self._all(PLAIN)) if most is None or size < most else ()

    @property
    def are_more(self) -> bool:
        """Whether results were added since construction."""
        return not {*map(id, self._results())} <= {*map(id, self.then)}

    def arguments(self) -> Iterator[Any]:
        """Yield the arguments for which the cache has results."""
        for key in self._table():
            yield from key if isinstance(key, tuple) else (key,)

    def _table(self) -> dict[Any, Any]:
        """The cache's dictionary from arguments to results; with a size limit, to links (the cache then refers to results
        itself)."""
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
    """Raise ``CaptureError`` if a cache has a result for one of the ``copies`` (by id) or for a traced tensor: the original may
    have another result. Classes with their own ``__hash__`` are fine: an object equal to its copy finds the copy's result."""
    for results in caches:
        for one in results.arguments():
            copied = id(one) in copies and type(one).__hash__ is object.__hash__  # type: ignore[comparison-overlap]
            if copied or isinstance(one, (FakeTensor, FunctionalTensor)):
                raise CaptureError(
                    f"{results.cache.__qualname__} keeps its result for a {type(one).__name__} (functools.cache or lru_cache), "
                    "which planned calls would not look up: keep it in an attribute, or give the function numbers and texts."
                )


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cached function (``lru_cache``) in the user's code."""
    return type(value) is _CACHE and not is_library(value)


class _Noting(type):
    """The metaclass of the type that replaces that of caches: ``isinstance``, which Dynamo uses, accepts all caches."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _CACHE)


class _Found:
    """The ``functools.lru_cache`` objects found by the latest search of the process."""

    def __init__(self) -> None:
        self._links: list[weakref.ref[Any]] = []
        self._others = -1  # number of other references to their type

    def all(self) -> list[Any]:
        """All caches in the process. A search through all objects is slow, so it is skipped if the reference count of the
        caches' type, less the known caches, is unchanged: each cache refers to its type. (A new cache is missed if another
        reference ended at the same time, in frames of a traceback.)"""
        known = [one for link in self._links if (one := link()) is not None]
        if sys.getrefcount(_CACHE) - len(known) != self._others:
            found = {id(one): one for one in gc.get_referrers(_CACHE) if type(one) is _CACHE}  # except frozen ones
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
        """On leaving the context, clear the caches that got fake tensors inside it. ``reached``: caches that the run reached;
        searches miss those frozen by ``gc.freeze``."""
        try:
            with replaced(functools, "_lru_cache_wrapper", self.made):
                yield
        finally:
            for results in reached.values():
                self._misses.setdefault(results.cache, -1)
            for one, before in self._misses.items():
                if one.cache_info().misses != before:  # true of few among thousands
                    if _holds_fake(one, _DEPTH):
                        one.cache_clear()
                    self._misses[one] = one.cache_info().misses

    @property
    def made(self) -> type:
        """A replacement for functools' cache type that registers each new cache."""

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
