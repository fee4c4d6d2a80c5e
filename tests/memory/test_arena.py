"""The arena by itself: what is in it is never written over, whatever is allocated, kept, freed elsewhere or forgotten."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.memory import cpu_allocator
from lowtide.memory.arena import AddressTable, Arena, made

COUNTER = cpu_allocator.install()
pytestmark = pytest.mark.skipif(COUNTER is None, reason="this build of PyTorch takes no allocator in front of its own")
KIB = 1024


@pytest.fixture
def arena() -> Iterator[Arena]:
    assert COUNTER is not None
    arena = Arena()
    yield arena
    AddressTable.end()


def _new(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def _is_in(arena: Arena, tensor: torch.Tensor, base: int) -> bool:
    return base <= tensor.data_ptr() < base + arena.reserved_bytes


def _base(arena: Arena, table: AddressTable) -> int:
    """Where the block begins: operator 0 makes one tensor at offset 0."""
    for _ in range(2):
        table.begin(0)
        first = _new(KIB)
        table.end()
        address = first.data_ptr()
        del first
    return address


def test_a_tensor_goes_to_its_place_from_the_second_run_on(arena: Arena) -> None:
    """And what passes meanwhile to its own, though it is of the same size and comes first."""
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0)), ([(4 * KIB, KIB)], [], (KIB, KIB))])
    base = _base(arena, table)
    found = []
    for _ in range(3):
        table.begin(1)
        passing, kept = _new(KIB), _new(KIB)
        found.append((passing.data_ptr() - base, kept.data_ptr() - base))
        del passing
        table.end()
        del kept
    assert found[1:] == [(KIB, 4 * KIB)] * 2 and found[0] != found[1]
    assert arena.counts[1:] == (0, 0, 0)


def test_tensors_of_one_size_are_told_apart_by_name(arena: Arena) -> None:
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0)), ([(KIB, KIB), (2 * KIB, KIB), (-1, KIB)], [], (0, 0))])
    base = _base(arena, table)
    for _ in range(2):
        table.begin(1)
        outside, second, first = _new(KIB), _new(KIB), _new(KIB)
        made(first, second, outside)
        table.end()
        addresses = first.data_ptr() - base, second.data_ptr() - base
        in_arena = _is_in(arena, outside, base)
        if addresses != (KIB, 2 * KIB):
            del outside, second, first
    assert addresses == (KIB, 2 * KIB) and not in_arena


def test_a_place_that_is_taken_is_not_given_away(arena: Arena) -> None:
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0)), ([(KIB // 2, KIB)], [], (0, 0))])
    base = _base(arena, table)
    for run in range(3):
        table.begin(0)
        kept = _new(KIB).fill_(run)
        table.end()
        table.begin(1)
        over = _new(KIB).fill_(99)
        table.end()
        assert (kept == run).all() and (over == 99).all()
        assert abs(kept.data_ptr() - over.data_ptr()) >= KIB
        assert run == 0 or not _is_in(arena, over, base)
        del kept, over


def test_another_allocation_than_the_expected_one_is_learned_anew(arena: Arena) -> None:
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0)), ([(KIB, 2 * KIB)], [], (0, 0))])
    base = _base(arena, table)
    for size in (KIB, KIB, 2 * KIB, 2 * KIB, 2 * KIB):
        table.begin(1)
        tensor = _new(size)
        table.end()
        last = tensor.data_ptr() - base
        del tensor
    assert last == KIB and arena.counts[3] == 1


def test_memory_goes_with_the_last_tensor_in_it(arena: Arena) -> None:
    assert COUNTER is not None
    before = COUNTER.reserved_ahead_bytes
    own = Arena()
    assert own.reserve(64 * KIB) and COUNTER.reserved_ahead_bytes == before + 64 * KIB
    table = AddressTable(own, [([(0, KIB)], [], (0, 0))])
    _base(own, table)
    table.begin(0)
    kept = _new(KIB).fill_(7)
    table.end()
    del own, table
    gc.collect()
    assert COUNTER.reserved_ahead_bytes == before + 64 * KIB
    assert (kept == 7).all()
    del kept
    assert COUNTER.reserved_ahead_bytes == before


def test_a_larger_block_leaves_what_lies_in_the_smaller_one(arena: Arena) -> None:
    assert COUNTER is not None
    before = COUNTER.reserved_ahead_bytes
    arena.reserve(4 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0))])
    _base(arena, table)
    table.begin(0)
    kept = _new(KIB).fill_(3)
    table.end()
    assert arena.reserve(1 << 20)
    table.begin(0)
    other = _new(KIB).fill_(4)
    table.end()
    assert (kept == 3).all() and (other == 4).all() and arena.reserved_bytes == 1 << 20
    assert COUNTER.reserved_ahead_bytes == before + (1 << 20) + 4 * KIB
    del kept
    assert COUNTER.reserved_ahead_bytes == before + (1 << 20)


def test_what_cannot_be_reserved_leaves_what_there_was(arena: Arena) -> None:
    assert arena.reserve(4 * KIB)
    assert not arena.reserve(1 << 60)
    assert arena.reserved_bytes == 4 * KIB
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0))])
    base = _base(arena, table)
    table.begin(0)
    assert _new(KIB).data_ptr() == base and arena.counts == (2, 0, 0, 0)


def test_tensors_are_resized_shared_and_freed_elsewhere(arena: Arena) -> None:
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0))])
    _base(arena, table)
    table.begin(0)
    tensor = _new(KIB).fill_(5)
    table.end()
    tensor.resize_(4 * KIB)
    table.begin(0)
    shared = _new(KIB).fill_(6)
    table.end()
    holder = [tensor, shared.numpy()]
    del tensor, shared
    assert (holder[0][:KIB] == 5).all() and (holder[1] == 6).all()
    worker = threading.Thread(target=holder.clear)
    worker.start()
    worker.join()
    table.begin(0)
    again = _new(KIB)
    table.end()
    assert arena.counts[1] == 0 and again.numel() == KIB


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_frees_what_it_inherits(arena: Arena) -> None:
    arena.reserve(8 * KIB)
    table = AddressTable(arena, [([(0, KIB)], [], (0, 0))])
    _base(arena, table)
    table.begin(0)
    kept = [_new(KIB)]
    table.end()
    child = os.fork()
    if child == 0:
        kept.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


_SIZES = st.sampled_from([64, 100, KIB, 2 * KIB])
_OPERATORS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 6 * KIB), _SIZES), max_size=3), st.integers(0, 6 * KIB), _SIZES),
    min_size=1,
    max_size=5,
)
_RUNS = st.lists(
    st.tuples(st.integers(0, 4), st.lists(st.tuples(_SIZES, st.booleans()), max_size=4), st.integers(0, 9)), max_size=30
)


@given(_OPERATORS, _RUNS)
def test_nothing_is_written_over(operators: list, runs: list) -> None:  # type: ignore[type-arg]
    """Against memory of its own for each: any places, overlapping ones too, any allocations, freed in any order."""
    assert COUNTER is not None
    arena = Arena()
    arena.reserve(8 * KIB)
    rows = [
        ([(o // 64 * 64, size) for o, size in tensors], [], (at // 64 * 64, size)) for tensors, at, size in operators
    ]
    table = AddressTable(arena, rows)
    level = COUNTER.level_bytes
    alive: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (operator, allocations, freed) in enumerate(runs):
        table.begin(operator % len(rows))
        passing = []
        for position, (size, stays) in enumerate(allocations):
            tensor = _new(size).random_(generator=torch.Generator().manual_seed(31 * number + position))
            (alive if stays else passing).append((tensor, torch.from_numpy(tensor.numpy().copy())))
        assert all(torch.equal(one, expected) for one, expected in passing)
        del passing, allocations
        table.end()
        if alive:
            del alive[freed % len(alive)]
        tensor = None
        assert all(torch.equal(one, expected) for one, expected in alive)
    alive.clear()
    assert COUNTER.level_bytes == level
