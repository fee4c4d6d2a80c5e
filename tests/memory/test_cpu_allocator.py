"""The counter's machine code by itself, on a table of its own."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from lowtide.memory import machine_code

_SLOTS = 8
# Words of the state, by the names that the code has for them.
_STATE = ("level", "peak", "log_address", "log_capacity", "log_length", "uncounted", "limit", "thread")


class _Machine:
    """``release`` as it is assembled over ``table``, a row per slot: address, bytes."""

    def __init__(self) -> None:
        self.table = np.zeros((_SLOTS, 2), dtype=np.int64)
        self._state = np.zeros(len(_STATE), dtype=np.int64)
        self.released: list[int | None] = []
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.released.append)
        addresses = {name: self._state.ctypes.data + 8 * index for index, name in enumerate(_STATE)}
        code = machine_code.assemble(
            **addresses,
            original=0, original_allocate=0, original_deleter=_address(self._deleter), deleter_word=1,
            table=self.table.ctypes.data, hash_shift=64 - _SLOTS.bit_length() + 1, slot_mask=_SLOTS - 1, probes=_SLOTS,
            clock=1, make_room=0, refused=0,
        )  # fmt: skip
        self.release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code["release"])

    @property
    def level(self) -> int:
        return int(self._state[0])


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


@pytest.fixture
def machine() -> _Machine:
    return _Machine()


def test_a_release_takes_the_bytes_of_its_block(machine: _Machine) -> None:
    machine.table[3] = 0x1000, 640
    machine.table[4] = 0x2000, 32
    machine.release(0x1000)
    assert machine.level == -640
    assert machine.table[:, 0].tolist() == [0, 0, 0, 0, 0x2000, 0, 0, 0]
    assert machine.released == [0x1000]


def test_a_block_that_is_not_known_is_released_uncounted(machine: _Machine) -> None:
    machine.table[3] = 0x1000, 640
    machine.release(0x3000)
    assert machine.level == 0
    assert machine.table[3].tolist() == [0x1000, 640]
    assert machine.released == [0x3000]


def test_no_block_is_none_that_was_there_before(machine: _Machine) -> None:
    """An empty slot has the address of no block, and the bytes of the last block that it was for."""
    machine.table[:, 1] = 864
    machine.release(None)
    assert machine.level == 0
    assert machine.released == [None]
