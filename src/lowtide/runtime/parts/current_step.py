"""The current step: which programs ran in it, and how much memory code between them holds (measured)."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence

import torch

from lowtide.budget import is_percentage
from lowtide.runtime.calls.call import ModelCall
from lowtide.runtime.parts.between import HeldBetween
from lowtide.runtime.parts.forward_pass import ForwardPass, Passes, gradients_of, note_released
from lowtide.runtime.parts.step_record import Gap
from lowtide.runtime.planned import Planned
from lowtide.runtime.programs.entry import Entry
from lowtide.settings import Settings
from lowtide.sharing import Footprint, Member


class CurrentStep:
    """``ran``: the forward passes of the current step, in order; a graph may run several times, also by different
    plans. A pass that waits from an earlier step (a loss that is kept) counts in every step. ``gaps``: the most bytes
    that code between graphs held; ``steps``: number of steps begun; ``passes``: number of forward passes in all of
    them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.steps = self.passes = 0
        self.ran = Passes()
        self.gaps: list[Gap] = []
        self.between = HeldBetween()
        self._known: dict[Entry, tuple[Member, Footprint]] = {}  # memory of each entry by its plan
        self._ending = False  # a callback for the end of the backward pass is queued
        self._within = False  # inside ``call``
        self._nested = False  # in a backward pass that runs graphs
        self.broken_off = False  # a call of the current step ended in an error or an interrupt

    def _step_ended(self) -> None:
        """Hook: called before the next step begins."""

    @contextlib.contextmanager
    def call(self, device: torch.device) -> Iterator[None]:
        """A context for the call of a model that contains all graphs. Memory allocated before the first graph counts
        too."""
        self._begin(device)
        self._within = True
        try:
            yield
        except BaseException:
            self.broken_off = True
            raise
        finally:
            self._within = False
            self.ran.stay()

    def begin_nested(self) -> None:
        """Until ``end_nested``, code runs in the backward pass that may call graphs."""
        self._nested = True

    def end_nested(self) -> None:
        self._nested = False
        self._end_gap()

    def _begin(self, device: torch.device) -> None:
        """Begin a new step if most passes have had their backward pass, or will have none."""
        self.between.device = device
        self._ending = False  # also after a backward pass that failed
        self._end_gap(noted=False)  # other code ran since: the optimizer, say
        pending = self.ran.pending()
        if self.broken_off or 2 * len(pending) <= len(self.ran):
            self._step_ended()
            self.steps += 1
            self.broken_off = False
            self.gaps.clear()
            for one in pending:
                one.backward_between_bytes = None
            self.between.begin_step(self._saved_bytes(pending))
        else:
            self.between.count()
        self.ran = Passes(pending)
        self.between.watch()

    def enter(self, device: torch.device) -> None:
        """A graph is about to run."""
        if not self._within and not self._nested:
            self._begin(device)
            self._end_gap()
            return
        self.between.device = device
        self._end_gap()
        self.count()

    def count(self) -> None:
        """Count what is allocated now as held by code between graphs."""
        if self._nested or not all(one.is_pending for one in self.ran):
            self.between.count_all(self._saved_bytes(self.ran.pending()))
        else:
            self.between.count()

    def add(self, graph: Planned, entry: Entry, inputs: Sequence[torch.Tensor], call: ModelCall | None) -> None:
        """Note that ``graph`` ran by ``entry``. ``call``: ``None`` if the result has no gradient."""
        if call is not None:
            key = (id(graph), sum(1 for other in self.ran if other.graph is graph))
            beside = tuple(one.key for one in self.ran.pending())
            one = ForwardPass(key, graph, entry, weakref.ref(call), max(self.between.bytes, 0), beside=beside)
            one.waiting = beside if self._nested else None
            one.gradients = tuple(gradients_of(self.member(one)[0], inputs, self.ran))
            call.on_backward = functools.partial(self._measure_between, one)
            call.on_end = self._begin_gap
            self.ran.append(one)
            self.passes += 1
        self.go_on()

    def go_on(self) -> None:
        self._end_gap()
        self.between.go_on()

    def _begin_gap(self) -> None:
        self._end_gap()
        self.between.watch()

    def _end_gap(self, noted: bool = True) -> None:
        """Note the most that code between graphs held, beside what waiting graphs hold."""
        peak_bytes = self.between.watched()
        if peak_bytes is not None and noted:
            waiting = tuple(self.ran.pending())
            self.gaps.append((max(peak_bytes - self._saved_bytes(waiting), 0), waiting))

    def _saved_bytes(self, waiting: Sequence[ForwardPass]) -> int:
        return sum(self.member(one)[1].saved_bytes for one in waiting)

    def in_backward(self) -> None:
        """A backward pass is running; its end is the end of the last gap."""
        if not self._ending:
            self._ending = True
            if is_percentage(self.settings.given):
                note_released(self.ran.pending(), lambda one: self.member(one)[0])
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._ending = False
        self._end_gap()
        if self._nested:
            self.between.watch()

    def _measure_between(self, one: ForwardPass) -> None:
        """The backward pass of ``one`` begins: measure memory that no plan knows of."""
        self._end_gap()
        self.in_backward()
        self.ran.begin_backward(one, early=self._within)
        now = self.between.now()
        if now is None or one not in self.ran or (len(self.ran) < 2 and one.waiting is None):
            return
        place = self.ran.index(one)
        (member, _), *later = map(self.member, self.ran[place:])
        expected = self.ran.left_bytes()[place] + member.arriving_bytes
        if any(other.waiting is not None for other in self.ran[place:]):  # passes do not end in reverse order
            now = self.between.beside(self._saved_bytes(self.ran.pending())) or 0
        else:
            now += sum(taken.saved_bytes for _, taken in later)
        one.backward_between_bytes = max(now - expected, one.backward_between_bytes or 0)

    def member(self, one: ForwardPass) -> tuple[Member, Footprint]:
        """The program of a pass, and its memory by its plan."""
        entry = one.entry
        if entry not in self._known:
            member = Member(entry.program, entry.plan.costs)
            self._known[entry] = member, member.footprint(entry.plan.schedule)
        return self._known[entry]
