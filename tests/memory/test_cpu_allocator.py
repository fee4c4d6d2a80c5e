"""The counter by itself, on a table of its own."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from lowtide.memory.cpu_allocator import AllocationCounter


@pytest.fixture
def counter() -> AllocationCounter:
    return AllocationCounter(3)


def test_a_release_takes_the_bytes_of_its_block(counter: AllocationCounter) -> None:
    assert counter.enter(0x1000, 640) and counter.enter(0x2000, 32)
    counter.leave(0x1000)
    assert (counter.level_bytes, counter.peak_bytes) == (32, 672)
    counter.leave(0x2000)
    assert (counter.level_bytes, counter.peak_bytes) == (0, 672)


def test_a_block_that_is_not_known_is_released_uncounted(counter: AllocationCounter) -> None:
    counter.enter(0x1000, 640)
    counter.leave(0x3000)
    assert counter.level_bytes == 640
    counter.leave(0x1000)
    counter.leave(0x1000)
    assert counter.level_bytes == 0


def test_no_block_is_none_that_was_there_before(counter: AllocationCounter) -> None:
    """An empty slot has the address of no block, and the bytes of the last block that it was for."""
    for block in range(1, 9):
        counter.enter(0x1000 * block, 864)
    for block in range(1, 9):
        counter.leave(0x1000 * block)
    counter.leave(0)
    assert (counter.level_bytes, counter.uncounted_blocks) == (0, 0)


def test_a_full_table(counter: AllocationCounter) -> None:
    """A block that finds no place is not counted, and others are."""
    assert all(counter.enter(0x1000 * block, 10) for block in range(1, 9))
    assert not counter.enter(0x9000, 10)
    assert (counter.level_bytes, counter.uncounted_blocks) == (80, 1)
    counter.leave(0x3000)
    assert counter.enter(0x9000, 10)
    assert (counter.level_bytes, counter.uncounted_blocks) == (80, 1)


def test_a_log_holds_what_fits(counter: AllocationCounter) -> None:
    log = np.zeros((2, 2), np.int64)
    assert counter.start_log(log)
    assert not counter.start_log(np.zeros((9, 2), np.int64))
    for block in range(1, 4):
        counter.enter(0x1000 * block, 10)
    assert counter.stop_log() == 3
    counter.leave(0x1000)
    assert log[:, 1].tolist() == [10, 20]
    assert 0 < log[0, 0] <= log[1, 0]


def test_the_peak_is_lowered_and_raised(counter: AllocationCounter) -> None:
    counter.enter(0x1000, 50)
    counter.leave(0x1000)
    assert (counter.reset_peak(), counter.peak_bytes) == (0, 0)
    counter.raise_peak(50)
    counter.raise_peak(20)
    assert counter.peak_bytes == 50


def test_the_limited_thread(counter: AllocationCounter) -> None:
    assert counter.limited_thread == 0
    counter.limited_thread = threading.get_ident()
    assert counter.limited_thread == threading.get_ident()
