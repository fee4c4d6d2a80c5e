"""Patches that online contexts apply to the process outside their own objects, and why.

While at least one context is active, in whichever thread, and once however many there are:

- The methods of ``torch.Tensor`` in ``_ACCESS``. They read memory without running an operator, and so past the dispatch mode:
  an evicted tensor is rebuilt before each, and stays for as long as it lives where the memory may be seen from elsewhere
  afterwards. Where it may be written from elsewhere, nothing is computed again from it, or by whoever made it; so it is, too,
  before ``torch.UntypedStorage.resize_``, by which reversible networks give the memory of their inputs back. PyTorch's own
  mechanism, ``TorchFunctionMode``, is no substitute: it is off while it handles a call, so what a hook reads inside
  ``loss.backward()`` passes it by; it costs every call of PyTorch a microsecond; and it belongs to one thread.
- ``threading.Thread.start``. A dispatch mode belongs to one thread, and another one could read an evicted tensor: a thread that
  is started from inside a context runs inside it too.
- The stance of ``torch.compile``, where Dynamo is loaded: what Dynamo meets under a dispatch mode it does not compile, nor ever
  again afterwards, so it is told to run all as written.

Everything is put back as it was when the last context ends. What somebody else has replaced in the meantime stays theirs, and
what is ours under it only passes calls on. For the life of the process, but without effect outside contexts: the function that
``os.register_at_fork`` calls in a forked process (``context``), which restores what it reads and evicts nothing any more, and
the marks on our own code by which Dynamo leaves it alone (``uncompiled``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Access(enum.IntEnum):
    """Kind of access to a tensor's bytes: read now, perhaps read later, perhaps written now, perhaps written later."""

    READ = 0
    EXPORT = 1
    WRITE = 2
    SHARE = 3


_ACCESS = {
    **dict.fromkeys(("tolist", "__repr__", "__str__", "__format__"), Access.READ),
    **dict.fromkeys(("untyped_storage", "share_memory_"), Access.EXPORT),
    "data_ptr": Access.WRITE,
    **dict.fromkeys(("numpy", "__dlpack__"), Access.SHARE),
}
_Function = TypeVar("_Function", bound=Callable[..., Any])
Materialize = Callable[[torch.Tensor, Access], Callable[[], None] | None]


def uncompiled(function: _Function) -> _Function:
    """Mark ``function`` so that Dynamo skips it and everything that it calls; return it.

    Where a part of the program is compiled, Dynamo looks at every frame below it, and so at ours, which the dispatcher calls
    from there. PyTorch's own ``disable`` wraps a function in changes of thread state that an interrupt can leave undone; a
    mark on the code itself changes nothing.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class UncompiledMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that is not wrapped in PyTorch's own ``disable`` either, which every operator would pass: what it dispatches to is
    to be ``uncompiled``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Patches:
    """The patches, applied on creation and undone by ``remove``.

    ``materialize(tensor, access)`` is called before each method of a tensor; what it returns is called when the array that
    shares the memory is gone. ``resized(storage)`` is called before a storage is. Threads run inside ``inside()``, called in
    the thread that starts them; ``None``: as they are. Nothing is evicted by another thread inside ``alone()``.
    """

    def __init__(
        self,
        materialize: Materialize,
        resized: Callable[[torch.UntypedStorage], None],
        inside: Callable[[], AbstractContextManager[Any] | None],
        alone: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._active, self._alone = True, alone
        self._own = _Own()
        self._undo = ExitStack()
        for name, access in _ACCESS.items():
            self._replace(torch.Tensor, name, self._materializing(getattr(torch.Tensor, name), materialize, access))
        self._replace(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_, resized))
        self._replace(threading.Thread, "start", self._starting(threading.Thread.start, inside))
        if "torch._dynamo" in sys.modules:
            self._undo.push(torch.compiler.set_stance("force_eager"))

    def remove(self) -> None:
        self._active = False
        self._undo.close()

    @contextlib.contextmanager
    def threads_aside(self) -> Iterator[None]:
        """Context in which threads started by the calling thread stay outside the online mode."""
        self._own.starts = True
        try:
            yield
        finally:
            self._own.starts = False

    def _replace(self, owner: type, name: str, ours: Any) -> None:
        self._undo.callback(_put_back, owner, name, owner.__dict__.get(name), ours)
        setattr(owner, name, ours)

    def _materializing(self, original: Any, materialize: Materialize, access: Access) -> Any:
        @functools.wraps(original)
        @uncompiled
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self._alone() if self._active and access is Access.READ else contextlib.nullcontext():
                ended = materialize(tensor, access) if self._active else None
                try:
                    result = original(tensor, *args, **kwargs)
                finally:
                    if ended is not None and access is Access.READ:
                        ended()
            if ended is not None and isinstance(result, np.ndarray):  # its views hold it
                weakref.finalize(result, ended).atexit = False
            return result

        return method

    def _resizing(self, original: Any, resized: Callable[[torch.UntypedStorage], None]) -> Any:
        @functools.wraps(original)
        @uncompiled
        def method(storage: torch.UntypedStorage, size: int) -> Any:
            if self._active:
                resized(storage)
            return original(storage, size)

        return method

    def _starting(self, original: Any, inside: Callable[[], AbstractContextManager[Any] | None]) -> Any:
        @functools.wraps(original)
        def start(thread: threading.Thread) -> None:
            context = inside() if self._active and not self._own.starts else None
            if context is None:
                return original(thread)  # type: ignore[no-any-return]
            run, own = thread.run, thread.__dict__.get("run")

            @functools.wraps(run)
            def run_inside() -> None:
                _put_back(thread, "run", own, thread.run)
                with context:
                    run()

            thread.run = run_inside  # type: ignore[method-assign]
            try:
                original(thread)
            except RuntimeError:  # it was started before, or cannot be
                _put_back(thread, "run", own, thread.run)
                raise

        return start


class _Own(threading.local):
    starts = False  # threads that are none of the program's


def _put_back(owner: Any, name: str, original: Any, ours: Any) -> None:
    """Restore the owner's attribute (``None``: it was inherited), unless somebody else has replaced our patch."""
    if owner.__dict__.get(name) is not ours:
        return
    if original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
