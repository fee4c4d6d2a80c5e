"""Replace collectives that write into given tensors (such as ``torch.distributed.all_to_all_single``) by functional
ones while a model is traced. Programs support the functional ones (``distributed.collectives``) and run each once,
in the program's order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed

from lowtide.capture.trace.patches import wrapped
from lowtide.errors import CaptureError

_FUNCTIONAL = {  # in torch.distributed, and in torch.distributed._functional_collectives
    "all_to_all_single": "all_to_all_inplace",
    "all_gather_into_tensor": "all_gather_tensor_inplace",
    "all_gather_single": "all_gather_tensor_inplace",
    "reduce_scatter_tensor": "reduce_scatter_tensor_inplace",
    "reduce_scatter_single": "reduce_scatter_tensor_inplace",
    "all_gather": "all_gather_inplace",
    "all_reduce": "all_reduce_inplace",
}


@contextlib.contextmanager
def functional() -> Iterator[None]:
    """Inside, this thread's collectives are functional. A collective with ``async_op=True`` raises ``CaptureError``."""
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    from torch.distributed import _functional_collectives

    with contextlib.ExitStack() as stack:
        for name, other in _FUNCTIONAL.items():
            for module in (distributed, distributed.distributed_c10d):
                if hasattr(module, name) and hasattr(_functional_collectives, other):
                    stack.enter_context(wrapped(module, name, _instead(name, getattr(_functional_collectives, other))))
        yield


def _instead(name: str, functional: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> None:
            if async_op:
                raise CaptureError(
                    f"torch.distributed.{name}(async_op=True) is awaited elsewhere, which a program cannot follow: leave "
                    "async_op away, or use torch.distributed._functional_collectives."
                )
            functional(*args, **kwargs)

        return call

    return wrap


def refuse_others(_mode: Any, func: Any, _args: Any, _kwargs: Any) -> Any:
    """Raise ``CaptureError`` for any other communication: it would run during the trace, with other ranks."""
    if isinstance(func, torch._ops.OpOverload) and func.namespace == "c10d":
        raise CaptureError(
            f"the model communicates by {func}, which is known to no program. Call {', '.join(_FUNCTIONAL)} as attributes of "
            "torch.distributed, or use torch.distributed._functional_collectives."
        )
    return NotImplemented
