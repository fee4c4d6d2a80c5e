"""Ways to a tensor's bytes that lead past the dispatcher: they find the bytes in place.

``numpy()``, ``tolist()``, ``data_ptr()``, storages, DLPack and pickling read memory without running an operator. While a
context is active these methods of ``torch.Tensor`` rebuild an evicted tensor first; where the memory may be seen from
elsewhere afterwards, it stays for as long as the tensor lives. Where it may be written from elsewhere, nothing is computed
again from it, or by whoever made it.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lowtide.dynamic.uncompiled import uncompiled


class Access(enum.IntEnum):
    """What follows: the bytes are read now, may be read later, or may be written later."""

    READ = 0
    EXPORT = 1
    SHARE = 2


Touch = Callable[[torch.Tensor, Access], Callable[[], None] | None]
_ACCESS = {
    **dict.fromkeys(("tolist", "__repr__", "__str__", "__format__"), Access.READ),
    **dict.fromkeys(("data_ptr", "untyped_storage", "share_memory_"), Access.EXPORT),
    **dict.fromkeys(("numpy", "__dlpack__"), Access.SHARE),
}

_originals: dict[str, Any] = {}


def install(touch: Touch) -> None:
    """Have ``touch(tensor, access)`` called before each of these methods.

    What it returns is called when the array that shares the memory is gone.
    """
    for name, access in _ACCESS.items():
        inherited = name not in torch.Tensor.__dict__
        original = getattr(torch.Tensor, name)
        _originals[name] = None if inherited else original
        setattr(torch.Tensor, name, _touching(original, touch, access))


def remove() -> None:
    """Leave ``torch.Tensor`` as it was."""
    for name, original in _originals.items():
        if original is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, original)
    _originals.clear()


def _touching(original: Any, touch: Touch, access: Access) -> Any:
    @functools.wraps(original)
    @uncompiled
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ended = touch(self, access)
        result = original(self, *args, **kwargs)
        if ended is not None and isinstance(result, np.ndarray):  # its views hold it
            weakref.finalize(result, ended).atexit = False
        return result

    return method
