"""Operators that other libraries registered with ``torch.library``: which these are, what they declare, and how to run
them without a trace."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._higher_order_ops import effects

from lowtide.program.recurrent import NAMESPACE as RECURRENT
from lowtide.program.running_statistics import NAMESPACE as STATISTICS
from lowtide.program.value_gradients import NAMESPACE as VALUE_GRADIENTS

CHECKS = "lowtide_checks"
_OWN = {  # namespaces of PyTorch and of this project
    *("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "symm_mem", "fsdp", CHECKS),
    *("_c10d_functional_autograd", "_dtensor", RECURRENT, STATISTICS, VALUE_GRADIENTS),
    *("higher_order", "inductor", "mkldnn", "mkldnn_prepacked", "profiler", "quantized"),
}
# By operator: a context that restores what its implementation can reach. Set by whoever has inspected it.
KEEPING: dict[torch._ops.OpOverload, Callable[[], contextlib.AbstractContextManager[Any]]] = {}


def is_foreign(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in _OWN


def declares_effect(target: Any) -> bool:
    """Whether an operator does something beyond its schema: it declares an effect, or otherwise it would do nothing at
    all."""
    if not is_foreign(target):
        return False
    registered = getattr(effects, "_get_effect", lambda _: None)(target)
    return registered is not None or not (target._schema.returns or target._schema.is_mutable)


@contextlib.contextmanager
def unseen(target: Callable[..., Any]) -> Iterator[None]:
    """A context in which a foreign operator may be run to learn about it. Afterwards Python's and NumPy's generators,
    and what is known of the state behind the operator, are as before. For other targets it does nothing."""
    if not is_foreign(target):
        yield
        return
    generators = random.getstate(), np.random.get_state()
    try:
        with KEEPING[target]() if target in KEEPING else contextlib.nullcontext():
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
