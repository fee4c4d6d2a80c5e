"""Why calls of known shapes are captured again, and what the next capture learns from it.

``Novelty`` tells whether the programs of a model are reused, and what it costs if not. ``UnusualCalls`` are calls in
which a check of values goes otherwise than in all known programs, and which cannot be captured (a quantizer that
replaces unused codes, say). They run without a plan; other calls keep their program.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from lowtide.capture import Captured, Known
from lowtide.capture.trace.expected import Answers
from lowtide.errors import CaptureError
from lowtide.objects import structure
from lowtide.objects.keys import fingerprint
from lowtide.runtime.programs.entry import Entry, Signature

_LOG = logging.getLogger(__name__)
# Captures for the same shapes:
_MANY_CAPTURES = 8  # log a warning
_MOST_CAPTURES = 16  # limit if most calls need one and the model may run without a plan
_FEW_CAPTURES = 4  # the same, if a computed number, a drawn number or a counter of the model changes
_DECIDED_CAPTURES, _DECIDED_CALLS = 5, 4  # the same, if draws decide: limit, and calls per capture that justify it
_MANY_DRAWS, _OF_MANY_CAPTURES = 5, 2  # the same, if so many draws decide: too many paths to meet them all
_MOST_UNEXPECTED = 3  # programs for the same shapes that differ in how checks of values go
_LATEST, _NEW = 32, 27  # of so many latest calls, so many captured are too many
_IN_A_ROW = 16  # the same in a row, if programs depend on values (lengths, or drawn numbers)
_WORTH = 3  # a capture may take so many times as long as its operators
_MANY_APART = 16  # unusual calls, from which on they may be no more than half of all
_MOST_NOTED = 256  # kinds of unusual calls remembered


class ManyProgramsError(CaptureError):
    """Calls of the same shapes keep needing new programs, although each can be captured."""


class Recaptures:
    """``known``: what was seen to change from call to call. ``refuse_more`` and ``changed`` raise ``CaptureError`` if
    programs are seldom reused."""

    def __init__(self) -> None:
        self.known = Known()
        self.novelty = Novelty()
        self._counts: Counter[Signature] = Counter()
        self._counting: set[Signature] = set()  # signatures whose calls write what their program depends on

    def forget_one(self, key: Signature) -> None:
        """Do not count the latest capture: it was cheap, and later calls may reuse known programs."""
        if not self.known.computed and key not in self._counting:
            self._counts[key] -= 1

    def refuse_more(self) -> None:
        """Raise ``ManyProgramsError`` if most calls, of whatever shapes, need a capture."""
        why = self.novelty.why
        if why:
            raise ManyProgramsError(
                f"its programs seldom come again: {why}. Make what they depend on constant, pad sizes to few ones, or pass it "
                "as a tensor that is only computed with."
            )

    def learn(self, captured: Captured) -> None:
        """Keep what is still useful after a capture."""
        self.known = self.known.after(captured)

    def seen_since(self, latest: Entry, model: nn.Module) -> None:
        """A call of new shapes: numbers that differ from those of the ``latest`` call are likely to change again."""
        changed = latest.conditions[0].other_numbers(model)
        self.known = replace(self.known, numbers={**changed, **self.known.numbers})

    def changed(
        self,
        key: Signature,
        entries: Sequence[Entry],
        latest: Entry,
        model: nn.Module,
        inputs: list[torch.Tensor],
        may_be_apart: bool,
    ) -> None:
        """Log why none of ``entries``, the known programs for these shapes, is valid; warn once if this happens often.
        Raises ``ManyProgramsError`` if it happens too often and the call ``may_be_apart``, that is, run without a
        plan."""
        self._counts[key] += 1
        times, name, conditions = self._counts[key] + 1, type(model).__name__, latest.conditions[0]
        why, changed = conditions.broken(model, inputs), conditions.changed_inputs(model, inputs)
        self.known = self.known.with_changes(conditions, model, conditions.changed_inputs(model, inputs, numbers=True))
        computed = self.known.numbers.keys() & self.known.computed
        drawn = conditions.draws is not None and not conditions.draws.come_again
        if changed & conditions.written:  # a buffer that counts calls, a place in a queue
            self._counting.add(key)
        grows = bool(latest.captured.contract.effects.grown)
        few = (
            drawn or grows or key in self._counting or not self.known.comes_to_bounds(computed, _MOST_CAPTURES - times)
        )
        most, each = _FEW_CAPTURES if few else _MOST_CAPTURES, 1
        if drawn and conditions.draws is not None and conditions.draws.numbers is not None:
            many = sum(number.comparisons.decides for number in conditions.draws.numbers) >= _MANY_DRAWS
            most, each = _OF_MANY_CAPTURES if many else _DECIDED_CAPTURES, _DECIDED_CALLS
        if times >= most and each * times > sum(entry.calls for entry in entries) and may_be_apart:
            raise ManyProgramsError(
                f"its program depends on what changes from call to call ({why}), and was captured {times} times for the same "
                "shapes. Make it constant, keep it in a buffer, or pass it as a tensor that is only computed with."
            )
        _LOG.info("%s is captured again: %s", name, why)
        if times == _MANY_CAPTURES:
            _LOG.warning(
                "%s has been captured %d times for the same shapes: its program depends on what changes from call to call "
                "(%s). Each time takes a capture, and a plan where the program is another one. Make it constant, keep it in a "
                "buffer, pass it as a tensor that is only computed with, or run the model under lowtide.online.",
                name, times, why,
            )  # fmt: skip

    def say_values(self, entry: Entry, known: Mapping[Signature, Sequence[Entry]], model: nn.Module) -> None:
        """Log a warning if the new ``entry`` is one of many ``known`` ones that differ only in plain values among the
        arguments."""
        names, values, *rest = entry.key
        others = [
            ones[-1] for (of, with_, *more), ones in known.items() if (of, more) == (names, rest) and with_ != values
        ]
        if len(others) + 1 != _MANY_CAPTURES:
            return
        found = structure.difference(others[-1].sample.arguments, entry.sample.arguments, fingerprint)
        _LOG.warning(
            "%s has been captured %d times for calls that differ in plain values among their arguments alone%s: each takes a "
            "capture, which is longer than a step. Leave out of the call what it does not compute with (names of files, say), "
            "or pass it as a tensor.",
            type(model).__name__, _MANY_CAPTURES, f" ({found[0]!r:.40} and {found[1]!r:.40}, say)" if found else "",
        )  # fmt: skip

    @contextlib.contextmanager
    def unexpected(self, entries: Sequence[Entry], model: nn.Module, expected: Answers) -> Iterator[None]:
        """A context to capture a call whose checks of values go as ``expected`` says, unlike in all ``entries``. Raises
        ``CaptureError`` if there are too many entries."""
        if len(entries) >= _MOST_UNEXPECTED:
            raise CaptureError(
                "its program depends on the values of floating-point or random tensors: what it checks in the forward pass "
                f"went in {len(entries)} ways already. Make the decision independent of the data, or run the model under "
                "lowtide.online."
            )
        _LOG.info("%s is captured again: a value that it checks is not as it usually is", type(model).__name__)
        usual, self.known = self.known.expected, replace(self.known, expected=expected)
        try:
            yield
        except CaptureError:  # an error of the model itself, say
            self.known = replace(self.known, expected=usual)
            raise


class _Call(NamedTuple):
    seconds: float  # of capture and planning; 0 if the program was known
    operators: float  # seconds that its operators take that its operators take
    by_values: bool


class Novelty:
    """Statistics of the latest planned calls of a model: how many needed a capture."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_LATEST)

    def came(self, entry: Entry, seconds: float = 0.0) -> None:
        """A call is about to run ``entry``. ``seconds``: how long its capture and plan took, 0 if it was known."""
        conditions = entry.conditions[0]
        by_values = bool(conditions.questions) or conditions.draws is not None
        self._calls.append(_Call(seconds, entry.plan.time_ns / 1e9, by_values))

    @property
    def seconds(self) -> float:
        """Mean duration of the latest calls in seconds, captures included."""
        calls = self._latest(_IN_A_ROW)
        return sum(call.seconds + call.operators for call in calls) / max(len(calls), 1)

    @property
    def why(self) -> str:
        """A text that says that captures are too frequent to be worthwhile; empty if they are not."""
        few, many = self._latest(_IN_A_ROW), self._latest(_LATEST)
        never = len(few) == _IN_A_ROW and all(call.seconds and call.by_values for call in few)
        seldom = len(many) == _LATEST and sum(call.seconds > 0 for call in many) >= _NEW
        calls = few if never else many
        taken, operators = sum(call.seconds for call in calls), sum(call.operators for call in calls)
        if not (never or seldom) or taken <= _WORTH * operators:
            return ""
        new = sum(call.seconds > 0 for call in calls)
        return f"{new} of the last {len(calls)} calls were captured, which took {taken:.1f} s beside {operators:.1f} s"

    def _latest(self, number: int) -> list[_Call]:
        return [*self._calls][-number:]


class UnusualCallError(Exception):
    """This call of a part runs without a plan."""


class UnusualCalls:
    """Calls of one module that cannot be captured, by signature and outcome of their checks."""

    def __init__(self) -> None:
        self._why: dict[tuple[Signature, Answers], str] = {}
        self._calls: Counter[Signature] = Counter()

    def why(self, key: Signature, expected: Answers) -> str:
        """Why calls with this signature and outcome of the first checks have no program; empty if unknown."""
        return self._why.get((key, expected), "")

    def note(self, key: Signature, expected: Answers, why: str) -> None:
        if len(self._why) >= _MOST_NOTED:
            self._why.clear()
            self._calls.clear()
        self._why[key, expected] = why

    def are_usual(self, key: Signature, calls: int) -> bool:
        """Count one more unusual call among ``calls`` with this signature. Returns whether they are the majority
        now."""
        self._calls[key] += 1
        return self._calls[key] >= _MANY_APART and 2 * self._calls[key] > calls
