"""Emptying a storage and filling it again, so that every tensor on it sees both, without copying a byte.

PyTorch 2.13 exchanges the memory of two storages by ``UntypedStorage._swap_data_ptr_``. Before, the same words of the two
``c10::StorageImpl`` are exchanged here: the three of the unique pointer in ``c10::DataPtr`` (data, and context with
deleter) and the size that follows the device. Where they stand is probed once on two storages, not taken for granted.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import UntypedStorage

from lowtide.errors import ExecutionError

_WORDS = 10
_SIZE_AFTER = 4  # data, context, deleter (in the standard library's order), device


def empty(storage: UntypedStorage) -> None:
    """Free the storage's memory. It keeps its size, so that views of it can be made; it must not be read."""
    nothing = torch._C._construct_storage_from_data_pointer(0, storage.device, storage.nbytes())
    fill(storage, nothing)  # type: ignore[arg-type]


def is_empty(storage: UntypedStorage) -> bool:
    """Whether the storage's memory was freed by ``empty``."""
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # PyTorch raises for a nonzero size without memory
        return True


def swap_words(one: UntypedStorage, other: UntypedStorage) -> None:
    """Exchange the memory of two storages by swapping words of their ``StorageImpl``."""
    first = _first_word()
    a, b = _words(one), _words(other)
    for word in (*range(first, first + 3), first + _SIZE_AFTER):
        a[word], b[word] = b[word], a[word]


def _words(storage: UntypedStorage) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * _WORDS).from_address(storage._cdata)


@functools.cache
def _first_word() -> int:
    """Return the word index of the data pointer in ``StorageImpl``; ``ExecutionError`` if the layout is unknown."""
    storages = [torch.arange(n, dtype=torch.uint8).untyped_storage() for n in (40, 56)]
    found = [
        word
        for word in range(1, _WORDS - _SIZE_AFTER)
        if all(_words(s)[word] == s.data_ptr() and _words(s)[word + _SIZE_AFTER] == s.nbytes() for s in storages)
    ]
    if len(found) != 1:
        raise ExecutionError(
            f"the online mode cannot exchange the memory of storages under PyTorch {torch.__version__}: c10::StorageImpl "
            "is laid out in an unknown way; PyTorch 2.13 or later offers the exchange itself."
        )
    return found[0]


# Moves the memory of the second storage, which is empty afterwards, into the empty first one of the same size.
fill: Callable[[UntypedStorage, UntypedStorage], None] = getattr(UntypedStorage, "_swap_data_ptr_", swap_words)
