"""Why calls of shapes that are known are captured again, and what is learned from it for the next capture.

``Novelty`` tells whether the programs of a model come again, and what it takes that they do not. ``UnusualCalls`` are those in
which a check of values goes otherwise than in any program that is known, where what they do is no graph: codes of a quantizer
that nobody uses are replaced, say. They run apart, and leave the others their program.
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
_MANY_CAPTURES = 8  # for the same shapes: said in the log
_MOST_CAPTURES = 16  # for the same shapes, in most calls, of what may run in parts instead
_FEW_CAPTURES = 4  # the same, where a number changes that is computed with, what is drawn, or what it counts itself
_DECIDED_CAPTURES, _DECIDED_CALLS = 5, 4  # the same, where draws decide, in fewer calls than so many for each capture
_MANY_DRAWS, _OF_MANY_CAPTURES = 5, 2  # the same, where so many draws decide: there are more ways than calls will show
_MOST_UNEXPECTED = 3  # programs for the same shapes that differ in how checks of values go
_LATEST, _NEW = 32, 27  # calls, and how many of them are captured where that is so in most
_IN_A_ROW = 16  # the same where programs depend on values (lengths, say, or what is drawn), of which none come again
_WORTH = 3  # times as long as its operators take, a capture may take
_MANY_APART = 16  # unusual calls: more than half of all may then be no more
_MOST_NOTED = 256  # ways in which unusual calls go


class ManyProgramsError(CaptureError):
    """Calls of the same shapes have been other programs again and again. Each could be captured."""


class Recaptures:
    """``known``: what was seen to change from call to call. Both methods raise ``CaptureError`` where it does so again and
    again."""

    def __init__(self) -> None:
        self.known = Known()
        self.novelty = Novelty()
        self._counts: Counter[Signature] = Counter()
        self._counting: set[Signature] = set()  # of calls that write what their program depends on

    def forget_one(self, key: Signature) -> None:
        """It took little, and calls may come to programs that are known."""
        if not self.known.computed and key not in self._counting:
            self._counts[key] -= 1

    def refuse_more(self) -> None:
        """Raises ``ManyProgramsError`` where most calls of whatever shapes are captured."""
        why = self.novelty.why
        if why:
            raise ManyProgramsError(
                f"its programs seldom come again: {why}. Make what they depend on constant, pad sizes to few ones, or pass it "
                "as a tensor that is only computed with."
            )

    def learn(self, captured: Captured) -> None:
        """What is still worth knowing after a capture."""
        self.known = self.known.after(captured)

    def seen_since(self, latest: Entry, model: nn.Module) -> None:
        """A call of new shapes: numbers that are other ones than those of the ``latest`` call are likely to change again."""
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
        """Log why none of the ``entries``, the programs that are known for these shapes, holds; once louder, where that is so
        again and again."""
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
        """Say in the log where a new ``entry`` is one of many of the ``known`` that plain values among arguments tell apart."""
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
        """Inside, a call is captured whose checks of values go like this, and otherwise in all of the ``entries``."""
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
        except CaptureError:  # the model's own error, say
            self.known = replace(self.known, expected=usual)
            raise


class _Call(NamedTuple):
    seconds: float  # of capture and planning; 0 where the program was known
    operators: float  # seconds
    by_values: bool


class Novelty:
    """Of the latest calls of a model by plans."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque(maxlen=_LATEST)

    def came(self, entry: Entry, seconds: float = 0.0) -> None:
        """A call is about to run by ``entry``, which took so long to capture and to plan, if it was not known."""
        conditions = entry.conditions[0]
        by_values = bool(conditions.questions) or conditions.draws is not None
        self._calls.append(_Call(seconds, entry.plan.time_ns / 1e9, by_values))

    @property
    def seconds(self) -> float:
        """Of a call, in the mean of the latest."""
        calls = self._latest(_IN_A_ROW)
        return sum(call.seconds + call.operators for call in calls) / max(len(calls), 1)

    @property
    def why(self) -> str:
        """In words, that programs come too seldom again to be captured; empty where they do."""
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
    """This call of a part runs as if it were none."""


class UnusualCalls:
    """Those of one module, which are no program."""

    def __init__(self) -> None:
        self._why: dict[tuple[Signature, Answers], str] = {}
        self._calls: Counter[Signature] = Counter()

    def why(self, key: Signature, expected: Answers) -> str:
        """Why there is no program for calls with this signature whose first checks go like this; empty where that is not
        known."""
        return self._why.get((key, expected), "")

    def note(self, key: Signature, expected: Answers, why: str) -> None:
        if len(self._why) >= _MOST_NOTED:
            self._why.clear()
            self._calls.clear()
        self._why[key, expected] = why

    def are_usual(self, key: Signature, calls: int) -> bool:
        """There is another of them, among so many ``calls`` with this signature: whether they are most of these by now."""
        self._calls[key] += 1
        return self._calls[key] >= _MANY_APART and 2 * self._calls[key] > calls
