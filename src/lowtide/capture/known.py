"""What is known about a call before it is traced. Each trace adds what it learned, for the next one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from lowtide.capture.contract import Captured, Conditions
from lowtide.capture.python_state.effects.held_inputs import HeldInputs
from lowtide.capture.python_state.effects.random_numbers import RandomRecorder
from lowtide.capture.python_state.guards.compared import Comparisons
from lowtide.capture.python_state.guards.reads import Place, Read
from lowtide.capture.python_state.paths import AttributePath
from lowtide.capture.read_numbers import Variables
from lowtide.capture.rehearsal import Effects
from lowtide.capture.trace.expected import Answers
from lowtide.objects.places import current

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known about a call before it is traced: from an earlier trace, or from another program of the same call.

    - ``effects``: what the call does to attributes; ``None`` if not known yet.
    - ``follow``: attributes whose tensors are inputs of the program, not constants. A trace may find more, unless they
      are given as ``HeldInputs``: then they are those of another program, in its order.
    - ``recorder``: the state in which the generators of Python and NumPy start; by default their present one.
    - ``changed_backward``: what differed after a backward pass, because the pass or another thread changed it.
    - ``numbers``: numbers in Python that were read and that change; the trace finds out how they are compared.
      ``computed``: those with which the call does more than compare. ``bounds``: how the call compares these first; if a
      comparison turns out otherwise, the call may do nothing more with the number. ``tried``: where this was tried.
    - ``scalars``: whether numbers that operators take may become inputs of the program. ``moved``: whether this trace
      gives operators other numbers instead.
    - ``items``: whether Python may read numbers from computed tensors (``loss.item()``). ``clocks``: the same for
      clocks. ``converting``: variables of modules whose code converts such numbers by ``float`` or ``int``.
    - ``unknown``: flat inputs with other whole numbers in each call; numbers that code reads from them count as read
      from computed tensors. ``asked``: those with which the call does more.
    - ``expected``: how the first checks of values go (``trace.expected``); ``None``: expect nothing.
    """

    effects: Effects | None = None
    follow: frozenset[AttributePath] | HeldInputs = frozenset()
    recorder: RandomRecorder | None = None
    changed_backward: frozenset[str] = frozenset()
    numbers: Mapping[Place, Read] = field(default_factory=dict)
    computed: frozenset[Place] = frozenset()
    bounds: Mapping[Place, Comparisons] = field(default_factory=dict)
    tried: frozenset[Place] = frozenset()
    expected: Answers | None = ()
    scalars: bool = True
    moved: bool = False
    items: bool = True
    clocks: bool = True
    converting: tuple[Variables, ...] = ()
    unknown: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()

    @staticmethod
    def of(captured: Captured) -> Known:
        """What to know for tracing the same call again."""
        contract = captured.contract
        numbers, expected = contract.conditions.compared(), contract.conditions.expected
        recorder = contract.conditions.recorder()
        unknown = contract.conditions.unknown
        return Known(
            contract.effects, contract.held_inputs, recorder, numbers=numbers, expected=expected, unknown=unknown
        )

    @staticmethod
    def like(captured: Captured) -> Known:
        """What to know for tracing a similar call whose Python code does something else."""
        known = Known.of(captured)
        return replace(known, effects=None, follow=known.attributes, recorder=None)

    def without_numbers_read(self, effects: Effects | None, clocked: bool = False) -> Known:
        """What to try next if code does more with numbers read from tensors than can be followed. ``clocked``: some of the
        numbers are those of clocks."""
        if clocked:
            _LOG.info(
                "the forward pass does more with what a clock says than to compute with it, or to keep or return it: planned "
                "calls have what all clocks said in the capture"
            )
            return replace(self, effects=effects, clocks=False)
        return replace(self, effects=effects, items=self.items and bool(self.unknown), unknown=frozenset())

    def with_changes(self, conditions: Conditions, model: nn.Module, unknown: frozenset[int]) -> Known:
        """What to know for a call for which ``conditions`` no longer hold: what has changed is likely to change again.
        ``unknown``: flat inputs with other numbers than in the previous call."""
        numbers = {**self.numbers, **conditions.other_numbers(model)}
        met = (self.bounds.keys() & numbers.keys()) - self.tried
        passed = {place for place in met if not self.bounds[place].hold(current(*numbers[place][:3]))}
        left = replace(self, computed=self.computed - passed, tried=self.tried | passed)
        follow, unknown = self.attributes | conditions.other_tensors(model), self.unknown | unknown - self.asked
        return replace(left, follow=follow, numbers=numbers, unknown=unknown)

    def comes_to_bounds(self, places: Iterable[Place], calls: int) -> bool:
        """Whether all of these numbers will compare otherwise within so many ``calls``, if they go on changing as they did
        since the last call."""
        bounds = {place: bound for place, bound in self.bounds.items() if place not in self.tried}
        return all(place in bounds and bounds[place].turns(self.numbers[place], calls) for place in places)

    def after(self, captured: Captured) -> Known:
        """What is still worth knowing after a call was ``captured`` with this knowledge. Numbers that the call did not read
        stay as they are."""
        conditions = captured.contract.conditions
        compared, bounds = conditions.compared(), {**self.bounds, **conditions.bounds}
        there = conditions.places()
        unread = {place: read for place, read in self.numbers.items() if read.outer not in there}
        computed = self.computed | self.numbers.keys() - compared.keys() - unread.keys()
        asked = self.asked | self.unknown - conditions.unknown
        unknown = self.unknown & conditions.unknown
        return replace(
            self, computed=computed, bounds=bounds, numbers={**unread, **compared}, unknown=unknown, asked=asked
        )

    @property
    def attributes(self) -> frozenset[AttributePath]:
        return self.follow.attributes() if isinstance(self.follow, HeldInputs) else self.follow
