"""Ways to a tensor's bytes that lead past the dispatcher: they find the bytes in place.

``numpy()``, ``tolist()``, ``data_ptr()``, storages, DLPack and pickling read memory without running an operator. While a
context is active these methods of ``torch.Tensor`` rebuild an evicted tensor first; where the memory may be seen from
elsewhere afterwards, it stays for as long as the tensor lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_READS = ("tolist", "__repr__", "__str__", "__format__")
_EXPORTS = ("numpy", "data_ptr", "untyped_storage", "__dlpack__", "share_memory_")

_originals: dict[str, Any] = {}


def install(touch: Callable[[torch.Tensor, bool], None]) -> None:
    """Have ``touch(tensor, export)`` called before each of these methods."""
    for name in (*_READS, *_EXPORTS):
        inherited = name not in torch.Tensor.__dict__
        original = getattr(torch.Tensor, name)
        _originals[name] = None if inherited else original
        setattr(torch.Tensor, name, _touching(original, touch, export=name in _EXPORTS))


def remove() -> None:
    """Leave ``torch.Tensor`` as it was."""
    for name, original in _originals.items():
        if original is None:
            delattr(torch.Tensor, name)
        else:
            setattr(torch.Tensor, name, original)
    _originals.clear()


def _touching(original: Any, touch: Callable[[torch.Tensor, bool], None], *, export: bool) -> Any:
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        touch(self, export)
        return original(self, *args, **kwargs)

    return method
