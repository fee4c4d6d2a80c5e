"""What the extension declares. It is built from ``native/``; change ``NATIVE_INTERFACE`` with this file.

Arrays are read where they lie, so they must be of the types that are named and contiguous; results are new arrays.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lowtide.solve.blocks.chain import BlockSpan
from lowtide.solve.model.classes import Classes
from lowtide.solve.model.compact import CompactGraph
from lowtide.solve.moving.chain_table import ChainCosts
from lowtide.solve.moving.steps import Program, Steps
from lowtide.solve.search.anneal import AnnealSettings
from lowtide.solve.search.memory_paths import PathQuestion

_Indices = npt.NDArray[np.int32]
_Numbers = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_Bytes = npt.NDArray[np.uint8]
_Candidate = tuple[_Indices, int, int]

built_for: tuple[str, int]
sources: str

class Random:
    def __init__(self, state: int) -> None: ...
    def below(self, bound: int) -> int: ...

def sweep(model: CompactGraph, codes: _Indices) -> _Candidate: ...
def greedy_sequence(model: CompactGraph, budget: int, most_steps: int) -> _Indices: ...
def anneal(
    model: CompactGraph, classes: Classes, first: _Indices, settings: AnnealSettings, random: Random
) -> _Candidate: ...
def memory_path(model: CompactGraph, question: PathQuestion) -> tuple[bool, _Indices, int] | None:
    """Whether there is one, its nodes and the time of recomputes; ``None`` where a limit was met."""

def best_splits(times: _Numbers, slots: int) -> _Indices: ...

class Profile:
    def __init__(self, slots: int) -> None: ...
    def add(self, first: int, last: int, amount: int) -> None: ...
    def values(self) -> _Numbers: ...
    def excess(self, budget: int) -> tuple[int, int]: ...
    @property
    def peak(self) -> int: ...
    @property
    def peak_slot(self) -> int: ...

class Timeline:
    def __init__(self, model: CompactGraph, classes: Classes, length: int, repeats: int, random: Random) -> None: ...
    def load(self, codes: _Indices) -> None: ...
    def next_move(self, rejected: bool, coin: int, lowering: bool) -> bool: ...
    def codes(self) -> _Indices: ...
    @property
    def recompute_ns(self) -> int: ...
    @property
    def profile(self) -> Profile: ...

def measure_options(model: CompactGraph, span: BlockSpan, options: Sequence[_Indices]) -> _Numbers:
    """A row for each option: saved bytes, forward peak, backward peak, time to run again, extra time."""

def undominated(figures: _Numbers, columns: int) -> _Indices:
    """Of rows of so many figures, sorted, those that no row before them equals or undercuts in every column."""

def lazy_codes(model: CompactGraph, span: BlockSpan, kept: _Flags, retain: bool) -> _Indices:
    """The block's backward nodes, each preceded by recomputes of what it reads and nobody has.

    ``kept`` (by node) tells whose results are there from the forward pass. With ``retain`` everything recomputed stays
    for later readers, else only what the backward node itself reads does.
    """

def shrinking_sets(model: CompactGraph, span: BlockSpan, weight: float) -> _Flags:
    """Rows of kept flags (by node): all, then without the node whose loss costs least time per byte saved, and so on.

    Bytes saved count ``weight`` times the backward peak on top. Quadratic in the block's nodes, times its codes.
    """

def fill_table(
    forward_ns: _Numbers,
    crossing: _Numbers,
    forward_peak: _Numbers,
    gradients: _Numbers,
    start: _Numbers,
    saved: _Numbers,
    option_forward_peak: _Numbers,
    option_backward_peak: _Numbers,
    rerun_ns: _Numbers,
    extra_ns: _Numbers,
    size: int,
) -> tuple[_Numbers, _Indices]: ...
def chain_way(costs: ChainCosts) -> tuple[float, _Indices]:
    """Its time in ns, and the fields of its segments by row; no rows where there is none."""

def run_steps(program: Program, steps: Steps) -> tuple[int, int, int, int]:
    """The fields of a ``Run``."""

def starts_of(program: Program, steps: Steps) -> _Numbers:
    """When each step is asked for and, as one more number, when all has ended."""

def resident_bytes(program: Program, steps: Steps) -> _Numbers:
    """During each step and, as one more number, after the last."""

def place_steps(program: Program, steps: Steps, budget_bytes: int) -> tuple[_Indices, int, tuple[int, int, int, int]]:
    """Rows, boundary and the fields of the ``Run``, with transfers and collectives where they are waited for least."""

def movable_steps(program: Program, steps: Steps) -> _Indices:
    """Of what can come earlier, and of collectives, by row: the step, its lane, the first step that it can come before."""

def close_slots(model: CompactGraph, room: int, until: _Numbers, rounds: int) -> tuple[_Bytes, _Bytes, _Numbers]: ...

class Matrix:
    def __init__(self, start: _Indices, index: _Indices, value: _Floats, columns: int) -> None: ...

def ascend(
    matrix: Matrix,
    cost: _Floats,
    right: _Floats,
    lower: _Floats,
    upper: _Floats,
    x: _Floats,
    y: _Floats,
    weight: float,
    iterations: int,
) -> tuple[float, _Floats, _Floats, float]: ...

class Buffers:
    """Buffers to be placed: live from section ``first`` to before section ``last``, with ``size`` bytes, at least one."""

    def __init__(self, first: _Indices, last: _Indices, size: _Numbers) -> None: ...
    def fit(self, order: _Indices, rule: int) -> _Numbers:
        """Offsets by buffer, placed one after the other by ``lowtide.place.orders.Rule``."""

    def pack(
        self, rank: _Indices, capacity: int, most_visits: int, most_seconds: float
    ) -> tuple[int, _Numbers, _Numbers, int]:
        """0 and offsets by buffer where a placement within ``capacity`` is found, 1 where there is none, 2 where the search
        gave up; then, by buffer, how often it was one of those that had too many bytes, and the visits that it took."""

class AllocationCounter:
    """Level and peak of the bytes that the CPU allocator has handed out since the counter was installed."""

    def __init__(self, bits: int) -> None:
        """A counter by itself, with a table of two to the ``bits`` blocks, for tests."""

    def enter(self, block: int, nbytes: int) -> bool: ...
    def leave(self, block: int) -> None: ...
    @property
    def level_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def uncounted_blocks(self) -> int:
        """Blocks that found no place in the table; 0 unless hundreds of thousands of tensors are alive."""

    @property
    def reserved_bytes(self) -> int:
        """Memory that is taken up: blocks outside of arenas, and arenas."""

    @property
    def reserved_peak_bytes(self) -> int: ...
    @property
    def reserved_ahead_bytes(self) -> int:
        """Of ``reserved_bytes``, what arenas take up."""

    def reset_reserved_peak(self) -> int: ...
    def raise_reserved_peak(self, peak_bytes: int) -> None: ...
    def reset_peak(self) -> int:
        """The peak falls to the present level, which is returned."""

    def raise_peak(self, peak_bytes: int) -> None: ...
    def limit(self, limit_bytes: int | None, make_room: Callable[[int], bool] | None = None) -> None:
        """Hold the level at or below ``limit_bytes`` for the thread in ``limited_thread``; ``None`` lifts the limit.

        Before an allocation of n bytes would exceed it, ``make_room(n)`` is called in the allocating thread; where it
        returns false, the allocation fails as if the machine had no memory left. It must not raise, and may be called
        from inside an operator. Other threads are counted but never refused.
        """

    @property
    def limited_thread(self) -> int:
        """``threading.get_ident()`` of the thread that the limit holds for."""

    @limited_thread.setter
    def limited_thread(self, ident: int) -> None: ...
    def start_log(self, log: _Numbers) -> bool:
        """From now on write (monotonic ns, level) per event to the rows of ``log``, which must stay until ``stop_log``; false
        where a log runs already."""

    def stop_log(self) -> int:
        """Stop writing; the number of events seen, which may be more than were written."""

def install_counter(functions: tuple[int, int], storage: int, data: int) -> AllocationCounter: ...
def uninstall_counter(functions: tuple[int, int]) -> None: ...

class DeviceMemory:
    """Of one accelerator, for arenas: what they take up of it, and what lies in them."""

    @property
    def reserved_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...

def new_device_memory() -> DeviceMemory:
    """Of the device that is the current one whenever an arena reserves a block of it."""

def install_device_allocator(allocator: int, storage: int, data: int, granularity: int) -> None:
    """From now on planned allocations of a ``c10::Allocator`` go to their places. Raises ``RuntimeError`` where its class has
    another layout than expected, as ``storage``, the ``StorageImpl`` of a tensor whose bytes are at ``data``, shows."""

def uninstall_device_allocator() -> None: ...

class Arena:
    """A block of memory in which the tensors of planned steps have their places; what lies in it keeps it alive."""

    def __init__(self, memory: DeviceMemory = ...) -> None:
        """Without memory yet. Of the host's, by default, of which the installed counter knows; raises where there is none."""

    def reserve(self, nbytes: int) -> bool:
        """Make the block at least so large; false where there is no memory for it."""

    @property
    def reserved_bytes(self) -> int: ...
    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Allocations that went to their places; tensors whose places were taken; what operators use inside and found no room
        for; and allocations that were not the expected ones."""

_Place = tuple[int, int]  # offset and bytes

class AddressTable:
    """The places of a step, operator by operator: of its tensors, of second copies that are gone when it ends, and of what it
    uses inside. What an operator allocates when it runs first goes wherever there is room: it is learned which one is which."""

    def __init__(self, arena: Arena, rows: Sequence[tuple[Sequence[_Place], Sequence[_Place], _Place]]) -> None: ...
    def reserve(self) -> bool:
        """Make the block large enough for all places; false where there is no memory for it."""

    def begin(self, operator_index: int) -> None:
        """What this thread allocates from now on is of that operator."""

    @staticmethod
    def end() -> None:
        """What this thread allocates from now on is of no operator."""

    @staticmethod
    def is_learning() -> bool: ...
    @staticmethod
    def made(addresses: Sequence[int]) -> None:
        """While it is learned: the tensors that the operator made, in the order of their places."""

def watch_events(events: Sequence[str], function: Callable[[str, tuple[object, ...]], object]) -> None:
    """``function`` is called with these audit events (PEP 578) and what they are about, between ``begin_watch`` and
    ``end_watch``."""

def begin_watch() -> None: ...
def end_watch() -> None: ...
def audit_hook() -> int:
    """The address of a hook for ``PySys_AddAuditHook``."""

# Whether objects are put together as they were, by identities. What belongs together has the same place in each tuple.

def are_of_types(objects: tuple[object, ...], types: tuple[type, ...]) -> bool: ...
def have_attributes(objects: tuple[object, ...], names: tuple[str, ...], values: tuple[object, ...]) -> bool: ...
def have_dictionaries(objects: tuple[object, ...], dictionaries: tuple[dict[str, object], ...]) -> bool:
    """Whether these are the dictionaries of the objects' attributes."""

def have_items(
    mappings: tuple[Mapping[str, object], ...], keys: tuple[str, ...], items: tuple[object, ...]
) -> bool: ...
def have_no_items(mappings: tuple[Mapping[str, object], ...], keys: tuple[str, ...]) -> bool: ...
def are_empty(dictionaries: tuple[dict[str, object], ...]) -> bool: ...
def have_values(dictionaries: tuple[dict[str, object], ...], values: tuple[object, ...]) -> bool:
    """Whether these are the values of all of them, one after the other."""
