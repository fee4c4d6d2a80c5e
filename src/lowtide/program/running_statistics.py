"""Norms that write running statistics though their schemas say that they only read them, and functions that return new
statistics instead.

Eager's kernels on accelerators are such norms: on CUDA, ``F.batch_norm`` is ``cudnn_batch_norm`` where cuDNN supports
it, and ``nn.SyncBatchNorm`` combines the statistics of all ranks by ``batch_norm_gather_stats_with_counts``. For a
functional program, each has a form that runs the same kernel on copies of the statistics and returns these after its
results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "lowtide_statistics"
# By operator name: the positions of what it writes, and of the training flag (without one, it always writes).
WRITTEN: dict[str, tuple[tuple[int, ...], int | None]] = {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
    "batch_norm_gather_stats": ((3, 4), None),
    "batch_norm_gather_stats_with_counts": ((3, 4), None),
    "batch_norm_update_stats": ((1, 2), None),
}
FUNCTIONAL = frozenset(WRITTEN) - {"native_batch_norm"}  # which PyTorch makes functional itself
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def written_positions(name: str, args: Any) -> tuple[int, ...]:
    """The positions of the statistics that a call of the operator with this name writes."""
    positions, flag = WRITTEN.get(name, ((), None))
    return positions if flag is None or (len(args) > flag and args[flag]) else ()


def functional_form(func: torch._ops.OpOverload) -> Callable[..., tuple[Tensor, ...]]:
    """A function that takes what the norm ``func`` takes, and returns its results and its new statistics."""
    name = func._schema.name.split("::")[1]
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        positions, _ = WRITTEN[name]
        results = ", ".join(["Tensor"] * (len(func._schema.returns) + len(positions)))
        parameters, _, _ = str(func._schema).partition("(")[2].rpartition(") -> ")

        def run(*args: Any) -> tuple[Tensor, ...]:
            given = [one.clone() if place in positions and one is not None else one for place, one in enumerate(args)]
            return (*func(*given), *(given[place] for place in positions))

        _LIBRARY.define(f"{name}({parameters}) -> ({results})")  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{name}", run, lib=_LIBRARY)
    form: Callable[..., tuple[Tensor, ...]] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return form
