"""What a capture may begin with, and what each of its traces learns for the next one."""

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
    """What is known of a call before it is traced: from an attempt before, or from another program of the same call.

    ``effects``: what it does to attributes; ``None`` where that is to be found out. ``follow``: attributes whose tensors are
    inputs of the program instead of constants, more of which may be found; or just those of another program, in their order.
    ``recorder``: in which state the generators of Python and NumPy are; by default, in that of now. ``changed_backward``: what
    was another in the end of a backward pass, by the pass itself or by another thread: the pass would do it again. ``numbers``
    that were read and seen to change: how they compare is found out; ``computed``: those that the call does more with, and how
    it compares these first, if it does (``bounds``): where they compare otherwise, it may do no more than that, which is
    ``tried`` once.
    ``scalars``: whether numbers that operators take may be inputs of the program; ``moved``: operators are given others;
    ``items``: whether there may be numbers of tensors that the pass has computed, of ``clocks`` as well, and
    ``converting``: variables of modules whose code asks for these by ``float`` or ``int``.
    ``unknown``: flat inputs with other whole numbers in each call, of which a number that code reads is one that the pass has
    computed; ``asked``: those with which it does more.
    ``expected``: how the first checks of values go (``trace.expected``); with ``None`` there are to be none.
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
        """To trace the same call again."""
        contract = captured.contract
        numbers, expected = contract.conditions.compared(), contract.conditions.expected
        recorder = contract.conditions.recorder()
        unknown = contract.conditions.unknown
        return Known(
            contract.effects, contract.held_inputs, recorder, numbers=numbers, expected=expected, unknown=unknown
        )

    @staticmethod
    def like(captured: Captured) -> Known:
        """To trace a call that is like it but for what its Python code does."""
        known = Known.of(captured)
        return replace(known, effects=None, follow=known.attributes, recorder=None)

    def without_numbers_read(self, effects: Effects | None, clocked: bool = False) -> Known:
        """The next thing to try where more is done with numbers that are read of tensors than is known. ``clocked``: some are
        those of clocks."""
        if clocked:
            _LOG.info(
                "the forward pass does more with what a clock says than to compute with it, or to keep or return it: planned "
                "calls have what all clocks said in the capture"
            )
            return replace(self, effects=effects, clocks=False)
        return replace(self, effects=effects, items=self.items and bool(self.unknown), unknown=frozenset())

    def with_changes(self, conditions: Conditions, model: nn.Module, unknown: frozenset[int]) -> Known:
        """For another call, where these conditions do not hold any more: what has changed is likely to change again.
        ``unknown``: flat inputs with other numbers than in the call before."""
        numbers = {**self.numbers, **conditions.other_numbers(model)}
        met = (self.bounds.keys() & numbers.keys()) - self.tried
        passed = {place for place in met if not self.bounds[place].hold(current(*numbers[place][:3]))}
        left = replace(self, computed=self.computed - passed, tried=self.tried | passed)
        follow, unknown = self.attributes | conditions.other_tensors(model), self.unknown | unknown - self.asked
        return replace(left, follow=follow, numbers=numbers, unknown=unknown)

    def comes_to_bounds(self, places: Iterable[Place], calls: int) -> bool:
        """Whether all of these numbers, should they go on as from the last call to this one, will compare otherwise within so
        many ``calls``."""
        bounds = {place: bound for place, bound in self.bounds.items() if place not in self.tried}
        return all(place in bounds and bounds[place].turns(self.numbers[place], calls) for place in places)

    def after(self, captured: Captured) -> Known:
        """What is still worth knowing when a call has been ``captured`` with it. Numbers that this one did not read are as
        others left them."""
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
