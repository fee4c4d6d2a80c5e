"""Caches of the user's program that would keep fake tensors alive.

A model may build a constant in a function under ``functools.lru_cache`` (BEiT's relative positions). Traced, the cache
keeps a fake tensor, which the tracer's next pass, and the user's next eager call, would be handed. Caches that hold fake
tensors are cleared: what tracing put there goes, and the entries beside it are made again when asked for.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

_CACHE = type(functools.lru_cache(len))
_DEPTH = 3  # from the cache through its entry to a tensor, or to a container of tensors


def clear_caches_of_fakes() -> None:
    """Clear every ``functools.lru_cache`` in the process that holds a fake tensor."""
    # An instance refers to its type; looking at all objects would take several times as long.
    for found in gc.get_referrers(_CACHE):
        if type(found) is _CACHE and found.cache_info().currsize and _holds_fake(found, _DEPTH):
            found.cache_clear()


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
