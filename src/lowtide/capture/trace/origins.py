"""Where in the user's program the nodes of a trace come from: the module that ran, and the line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn

from lowtide.capture.trace.patches import wrapped

_KEY = "lowtide"  # inside the one annotation that the tracer copies to nodes


@contextlib.contextmanager
def origins_announced(model: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Inside, every module of a tree notes its path for the tracer while it runs, see ``origin``. ``call``: how modules are
    called otherwise."""
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
    """Module path and ``file:line`` that were current when a forward node was traced."""
    noted = node.meta.get("custom", {}).get(_KEY, {})
    return noted.get("module", ""), noted.get("source", "")


def period_of_casts(node: torch.fx.Node) -> str:
    """Until when a cast was kept, see ``trace.autocast``."""
    period: str = node.meta.get("custom", {}).get(_KEY, {}).get("casts", "")
    return period


def note(**changes: str) -> None:
    """What is current from now on."""
    custom = fx_traceback.current_meta.get("custom", {})
    fx_traceback.current_meta["custom"] = {**custom, _KEY: {**custom.get(_KEY, {}), **changes}}
