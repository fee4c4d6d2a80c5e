"""Keeping ``torch.compile`` out of the engine, and compiled functions compiled.

Where a part of the program is compiled, Dynamo looks at every frame below it, and so at the engine's, which the dispatcher
calls from there. PyTorch's own ``disable`` wraps a function in changes of thread state that an interrupt can leave
undone; a mark on the code itself (``uncompiled``) changes nothing. And what Dynamo meets under a dispatch mode it does not
compile, nor ever again afterwards; so it is told beforehand to run all as written (``as_written``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def uncompiled(function: _Function) -> _Function:
    """``function`` itself, marked: Dynamo leaves it alone, with all that it calls."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def as_written() -> Callable[[], None]:
    """Run compiled functions operator by operator until what is returned is called. Without Dynamo there are none."""
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    stance: Any = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)
