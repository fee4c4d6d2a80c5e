"""Which module and line of the user's program each node of a trace comes from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from lowtide.capture.trace.patches import wrapped

_KEY = "lowtide"  # key in the one annotation that the tracer copies to nodes


@contextlib.contextmanager
def origins_announced(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Inside, each module of the tree records its path for the tracer while it runs (see ``origin``). ``call``: what
    ``nn.Module.__call__`` does otherwise."""
    names = {id(module): name for name, module in model.named_modules()}
    path = [""]

    def noting(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path.append(names.get(id(module), path[-1]))
        note(module=path[-1])
        try:
            return call(module, *args, **kwargs)
        finally:
            path.pop()
            note(module=path[-1])

    with wrapped(nn.Module, "__call__", lambda _: noting):
        yield


def origin(node: torch.fx.Node) -> tuple[str, str]:
    """The module path and the ``file:line`` that were current when a forward node was traced."""
    noted = node.meta.get("custom", {}).get(_KEY, {})
    return noted.get("module", ""), noted.get("source", "")


def period_of_casts(node: torch.fx.Node) -> str:
    """The period in which autocast keeps a cast (``trace.autocast``)."""
    period: str = node.meta.get("custom", {}).get(_KEY, {}).get("casts", "")
    return period


def note(**changes: str) -> None:
    """Record changes of the current origin, for the nodes traced from now on."""
    custom = fx_traceback.current_meta.get("custom", {})
    fx_traceback.current_meta["custom"] = {**custom, _KEY: {**custom.get(_KEY, {}), **changes}}
