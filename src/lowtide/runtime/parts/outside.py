"""Memory held by submodules that are not parts, and which of them to run again if plans alone do not meet the
budget."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.capture.python_state.guards.reach import Reach
from lowtide.memory.allocators import allocated_bytes
from lowtide.objects import structure
from lowtide.objects.keys import fingerprint
from lowtide.program.distributed.collectives import collectives_begun
from lowtide.program.distributed.sharded import version_of
from lowtide.program.layouts import memory_of
from lowtide.runtime.parts.recomputed import reach_of
from lowtide.runtime.parts.shared import SharedBudget

_MOST_CUTS = 32
_MARGIN = 1.1  # factor on the missing bytes


@dataclass(eq=False)
class OutsideCall:
    """A call of a submodule (``kind``: its class, ``name``: its path) whose own code runs.

    - ``kept_bytes``: what it keeps for the backward pass, including parts inside it. ``held_bytes``: the same if these
      parts kept as much as without plans. ``input_bytes``: the size of its arguments, without those that earlier calls
      got too.
    - ``may_run_again``: whether its arguments can be restored, and it communicates with no other rank. Containers and
      objects can be restored; ``given`` tensors, listed with their versions, must not be written to by it or later
      code.
    - ``differentiated``: backward passes in it that are differentiated again. PyTorch's checkpointing holds one run for
      each.
    - ``inside``: the calls within it.
    """

    name: str
    kind: type
    input_bytes: int
    held_bytes: int = 0
    kept_bytes: int = 0
    may_run_again: bool = True
    differentiated: set[int] = field(default_factory=set)
    given: list[tuple[weakref.ref[torch.Tensor], int | None]] = field(default_factory=list)
    inside: list[OutsideCall] = field(default_factory=list)

    @property
    def again_bytes(self) -> int:
        """Bytes that it holds while it runs again."""
        return self.held_bytes * (1 + len(self.differentiated))

    @property
    def own_bytes(self) -> int:
        """Bytes kept by code between the calls inside it."""
        return max(self.kept_bytes - sum(one.kept_bytes for one in self.inside), 0)

    def check(self) -> None:
        """Note that it cannot run again if its arguments were written to."""
        for reference, version in self.given:
            tensor = reference()
            if tensor is not None and version_of(tensor) != version:
                self.may_run_again = False


class OutsideWatch:
    """The calls of one step, outermost first. ``again_ns``: first-run time of those that will run again."""

    def __init__(self, shared: SharedBudget) -> None:
        self.shared = shared
        self.calls: list[OutsideCall] = []
        self.again_ns = self._steps = 0
        self._open: list[OutsideCall] = []
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # arguments of ended calls, by memory

    @contextlib.contextmanager
    def call(self, name: str, kind: type, arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> Iterator[None]:
        self._begin()
        tensors, tree = structure.flatten(arguments)
        given = [(weakref.ref(each), version_of(each)) for each in tensors]
        memory = {memory_of(each): each for each in tensors if each.layout is torch.strided}
        new = [each.untyped_storage().nbytes() for key, each in memory.items() if not self._was_given(key)]
        one, contents = OutsideCall(name, kind, sum(new), given=given), _contents(tensors, tree)
        reach = reach_of(*arguments)
        (self._open[-1].inside if self._open else self.calls).append(one)
        ran, before, communicated = len(self.shared.ran), self._level(), collectives_begun()
        self._open.append(one)
        try:
            yield
        finally:
            self._open.pop()
            one.may_run_again = communicated == collectives_begun()
            one.may_run_again &= _contents(*structure.flatten(arguments)) == contents or _can_be_put_back(
                reach, arguments, contents
            )
            one.check()
            self._given.update((key, weakref.ref(each)) for key, each in memory.items())
            members = [self.shared.member(each) for each in self.shared.ran[ran:]]
            planned = sum(member.eager.saved_bytes - taken.saved_bytes for member, taken in members)
            one.kept_bytes = max(self._level() - before, 0)
            one.held_bytes = one.kept_bytes + planned

    @contextlib.contextmanager
    def runs_again(self) -> Iterator[None]:
        """A context for the first run of a submodule that will run again in the backward pass."""
        self._begin()
        began = time.perf_counter_ns()
        yield
        self.again_ns += time.perf_counter_ns() - began

    def differentiated(self) -> None:
        """A backward pass that is differentiated again has reached the open calls."""
        for one in self._open:
            one.differentiated.add(torch._C._current_graph_task_id())

    def _begin(self) -> None:
        """Start over if a new step has begun."""
        if self._steps != self.shared.steps:
            self._steps, self.calls, self._given, self.again_ns = self.shared.steps, [], {}, 0

    def _was_given(self, memory: int) -> bool:
        """Whether an earlier call got a tensor with this memory that still exists."""
        tensor = self._given[memory]() if memory in self._given else None
        return tensor is not None and memory_of(tensor) == memory

    def end(self) -> None:
        """The call of the model has ended: note which calls cannot run again because their arguments were written
        to."""
        for one in _every(self.calls):
            one.check()

    def kept_by(self, kind: type) -> int:
        """The most bytes, beside its arguments, that a repeatable call of a module of this class keeps in the current
        step."""
        calls = _every(self.calls) if self._steps == self.shared.steps else ()
        return max(
            (one.kept_bytes - one.input_bytes for one in calls if one.kind is kind and one.may_run_again), default=0
        )

    def _level(self) -> int:
        return allocated_bytes(self.shared.between.device) or 0

    def to_run_again(self, missing_bytes: int) -> list[str]:
        """Names of submodules that free ``missing_bytes`` if they run again, or of all that help if that much cannot be
        freed."""
        if self._steps != self.shared.steps:  # no calls in the last step
            return []
        sizes = sorted({one.held_bytes for one in _every(self.calls)}, reverse=True)[:_MOST_CUTS]
        cuts = [_cut(self.calls, size) for size in sizes]
        if not any(cuts):
            return []
        best = min(filter(None, cuts), key=lambda cut: _peak_bytes(self.calls, cut))
        if _peak_bytes(self.calls, best) >= sum(one.kept_bytes for one in self.calls):
            return []
        chosen: dict[str, int] = {}
        for one in best:
            chosen[one.name] = chosen.get(one.name, 0) + one.kept_bytes - one.input_bytes
        wanted = _MARGIN * missing_bytes + max(one.again_bytes for one in best)
        found: list[str] = []
        for name, freed in sorted(chosen.items(), key=lambda item: -item[1]):
            if wanted > 0:
                found.append(name)
                wanted -= freed
        return found


def _every(calls: list[OutsideCall]) -> Iterator[OutsideCall]:
    for one in calls:
        yield one
        yield from _every(one.inside)


def _cut(calls: list[OutsideCall], most_bytes: int) -> list[OutsideCall]:
    """The outermost calls that hold at most ``most_bytes``, and more than their arguments."""
    found = []
    for one in calls:
        if (one.held_bytes > most_bytes or not one.may_run_again) and one.inside:
            found += _cut(one.inside, most_bytes)
        elif one.may_run_again and one.kept_bytes > one.input_bytes:
            found.append(one)
    return found


def _peak_bytes(calls: list[OutsideCall], cut: list[OutsideCall]) -> int:
    """Bytes held if the calls in ``cut`` keep only their arguments and the largest of them runs again."""
    chosen = set(map(id, cut))

    def held(one: OutsideCall) -> int:
        if id(one) in chosen:
            return one.input_bytes
        return one.own_bytes + sum(map(held, one.inside))

    return sum(map(held, calls)) + max(one.again_bytes for one in cut)


def _contents(tensors: Sequence[torch.Tensor], tree: Any) -> Any:
    """The tensors that the arguments hold, by id, and a fingerprint of everything else."""
    return [*map(id, tensors)], fingerprint(tree)


def _can_be_put_back(reach: Reach, arguments: Any, contents: Any) -> bool:
    """Whether restoring the arguments brings back their former ``contents``."""
    now = reach.as_now()
    reach.put_back()
    try:
        return bool(_contents(*structure.flatten(arguments)) == contents)
    finally:
        now.put_back()
