"""Recognizes the program's repeated cycles, and has evictions and rebuilds follow plans for them.

A cycle that comes a second time is planned as a captured program is: planners know when everything will be read again, which
no heuristic does. While the program repeats the cycle, evictions and recomputation follow the plan. If the program leaves
every known cycle, or takes more memory than planned, the rules of the online mode (the heuristic) take over: they are always
in force, so a wrong plan costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import NamedTuple

from lowtide.dynamic.cycles import MOST_OPERATORS, Cycle, Performed
from lowtide.dynamic.guide import Follower, Guide
from lowtide.dynamic.habits import Habits, Known
from lowtide.dynamic.memory import Memory
from lowtide.dynamic.node import Node
from lowtide.dynamic.operators import Operator
from lowtide.dynamic.rebuild import Rebuilder, refused_bytes
from lowtide.memory.allocators import PeakWindow


class _Ended(NamedTuple):
    """An ended cycle: the plan that it followed, and the cycle if it is to be planned. ``rebuild_ns``: total before it."""

    rebuild_ns: int
    followed: tuple[Known, Guide] | None
    cycle: Cycle | None = None
    room_bytes: int = 0


class Foresight:
    """Recognizes the cycles of one run as they come, follows their plans, and watches unknown ones.

    A cycle belongs to one thread; with ``device_threads``, backward passes run in threads of their own. ``undisturbed()`` is a
    context in which started threads do not enter the online mode.
    """

    def __init__(
        self,
        habits: Habits,
        memory: Memory,
        rebuilder: Rebuilder,
        undisturbed: Callable[[], AbstractContextManager[None]],
        *,
        device_threads: bool,
    ) -> None:
        self.habits = habits
        self.memory = memory
        self.rebuilder = rebuilder
        self.undisturbed = undisturbed
        self.device_threads = device_threads
        self._made: list[tuple[Node, ...]] = []  # for each operator of the cycle, its recomputable results
        self._cycle: Cycle | None = None  # the current one, once it has begun
        self._thread = 0  # its thread
        self._backward = False  # whether its backward pass is under way
        self._room_bytes: int | None = None  # at the start of the cycle
        self._evictions = self._rebuild_ns = 0  # totals at the start of the cycle
        self._counted = False  # whether the running operator is part of the cycle
        self._followed: Known | None = None
        self._follower: Follower | None = None
        self._watcher = _Watcher(memory)
        self._ended: _Ended | None = None

    def before(self, operator: Operator, reads: Iterable[Node], *, backward: bool) -> None:
        """Record that the operator is about to come, and act on the plan. ``backward``: it is in a backward pass."""
        cycle, thread = self._cycle, get_ident()
        self._counted = cycle is None or thread == self._thread or (self.device_threads and backward)
        if not self._counted:
            return
        if self._backward and not backward and cycle is not None:
            self._end()
            self.learn()
            cycle = None
        self._backward = backward
        cycle = cycle or self._begin(thread)
        place = len(cycle.keys)
        if place >= MOST_OPERATORS and not cycle.cut:
            self._leave()
            cycle.give_up()
            self._made.clear()
        if cycle.cut:
            self._counted = False
            return
        cycle.keys.append((operator.run, *[node.size_bytes for node in reads]))
        if place == 0 or self._followed is not None:
            self._recognize(cycle, place)
            self._act(place)
        if cycle.watched:
            cycle.other_bytes.append(self.memory.meter.level_bytes - self.memory.pool.bytes - cycle.constant_bytes)

    def starts(self) -> None:
        """Start measuring the operator, whose inputs are resident now."""
        if self._counted and self._cycle is not None and self._cycle.watched:
            self._watcher.begin()

    def after(self, operator: Operator, reads: Iterable[Node], made: Sequence[Node], cost_ns: int) -> None:
        """Record the operator after it ran; ``made``: its new nodes, including new versions of storages."""
        cycle = self._cycle
        if cycle is None or not self._counted:
            return
        makes = tuple([node for node in made if node.call is not None])
        self._made.append(makes)
        if self._follower is not None:
            self.memory.counters.followed += 1
            self._follower.after(len(self._made) - 1)
        if cycle.watched:
            constants = tuple([node for node in made if node.call is None])
            peak_bytes = self._watcher.end()
            cycle.add(Performed(operator.name, tuple(reads), makes, constants, cost_ns, peak_bytes))

    def released(self, node: Node) -> None:
        if self._cycle is not None and self._cycle.watched:
            self._cycle.release(node)

    def evicted(self, node: Node) -> None:
        self._watcher.evicted(node.size_bytes)

    def close(self) -> None:
        """End the current cycle with the run. The caller restores held storages, and calls ``learn`` afterwards."""
        if self._cycle is not None:
            self._end()

    def learn(self) -> None:
        """Judge the plan that the ended cycle followed, and plan the cycle if needed."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        rebuild_ns = self.memory.counters.rematerialize_ns - ended.rebuild_ns
        if ended.followed is not None:
            known, guide = ended.followed
            known.judge(guide, rebuild_ns)
        if ended.cycle is not None:
            self.habits.learn(ended.cycle, ended.room_bytes, rebuild_ns)

    def forget(self) -> None:
        """Drop the state of the current cycle, for instance after an interruption at any point. Leaves the memory untouched."""
        self._cycle = self._followed = self._follower = None
        self._made = []
        self._backward = False
        self._watcher.forget()

    def _begin(self, thread: int) -> Cycle:
        with self.undisturbed():
            self.habits.exchange()
        counters = self.memory.counters
        self._thread = thread
        self._evictions, self._rebuild_ns = counters.evictions, counters.rematerialize_ns
        self._room_bytes = self.memory.room_bytes()
        watched = self.habits.evicted and self.habits.watch_left > 0 and self._room_bytes is not None
        self._cycle = Cycle(watched)
        return self._cycle

    def _end(self) -> None:
        """End the cycle, after the plan's actions for its end."""
        cycle, followed = self._cycle, self._followed
        assert cycle is not None
        self.memory.release_dead()
        as_known = followed is not None and len(followed.keys) == len(cycle.keys)
        if as_known:
            self._act(len(cycle.keys))
        counters, habits = self.memory.counters, self.habits
        by_plan = (followed, self._follower.guide) if as_known and followed and self._follower else None
        self._ended = _Ended(self._rebuild_ns, by_plan)
        self._leave()
        self.forget()
        evicted = counters.evictions > self._evictions
        habits.evicted |= evicted
        if not habits.evicted:
            return
        habits.ended(cycle, as_known=as_known)
        if evicted and habits.is_to_be_planned(cycle, self._room_bytes) and self._room_bytes is not None:
            self._ended = _Ended(self._rebuild_ns, by_plan, cycle, self._room_bytes)

    def _recognize(self, cycle: Cycle, place: int) -> None:
        """Follow the plan of a known cycle with the same operators so far, or none."""
        followed = self._followed
        if followed is not None and place < len(followed.keys) and followed.keys[place] == cycle.keys[place]:
            return
        self._leave()
        found = self.habits.find(cycle.keys, self._room_bytes)
        if found is not None:
            self._followed, guide = found
            self._follower = Follower(guide, self.memory, self.rebuilder, self._made)

    def _act(self, place: int) -> None:
        """Perform the plan's actions before this operator. Leave the plan if there is no room for them, or if rebuilds take far
        longer than they did without a plan."""
        if self._follower is None or self._followed is None:
            return
        rebuild_ns = self.memory.counters.rematerialize_ns - self._rebuild_ns
        if self._followed.is_far_off(rebuild_ns):
            self._followed.judge(self._follower.guide, rebuild_ns)
            self._leave()
            return
        try:
            self._follower.before(place)
        except RuntimeError as error:
            refused_bytes(error, self.memory)
            self._leave()

    def _leave(self) -> None:
        """Stop following the plan."""
        if self._follower is not None:
            self._follower.end()
        self._followed = self._follower = None


class _Watcher:
    """Measures an operator's memory: the peak above the level at its start, as if nothing had been evicted
    meanwhile."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._window: PeakWindow | None = None  # since the last eviction
        self._start_bytes = self._evicted_bytes = self._peak_bytes = 0

    def begin(self) -> None:
        """Start measuring an operator."""
        self.forget()
        self._window = PeakWindow(self.memory.meter)
        self._start_bytes = self._window.start_bytes

    def evicted(self, size_bytes: int) -> None:
        if self._window is not None:
            self._note(self._window)
            self._evicted_bytes += size_bytes
            self._window = PeakWindow(self.memory.meter)

    def end(self) -> int:
        """Stop measuring, and return the operator's peak in bytes."""
        assert self._window is not None
        self._note(self._window)
        peak_bytes = self._peak_bytes
        self.forget()
        return peak_bytes

    def _note(self, window: PeakWindow) -> None:
        above_bytes = window.start_bytes - self._start_bytes + window.peak_bytes
        self._peak_bytes = max(self._peak_bytes, above_bytes + self._evicted_bytes)
        window.close()

    def forget(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None
        self._evicted_bytes = self._peak_bytes = 0
