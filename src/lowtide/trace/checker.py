"""Check a trace: every tensor is made once, before it is used, and not used after its release."""

from __future__ import annotations

from lowtide.errors import LowtideError
from lowtide.trace.model import Constant, Event, OperatorCall, Pin, Release, Trace


class Checker:
    """Checks a trace event by event."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.made: set[int] = set()

    def step(self, event: Event) -> None:
        """Check one event. Raises ``LowtideError`` that says what is wrong with it."""
        match event:
            case Constant():
                self._make(event.tensor)
            case OperatorCall():
                self._call(event)
            case Release():
                self._expect(event.tensor, "releases")
                self.live.remove(event.tensor)
            case Pin():
                self._expect(event.tensor, "pins")

    def _call(self, call: OperatorCall) -> None:
        for tensor in (*call.reads, *call.writes):
            self._expect(tensor, f"{call.name} reads")
        for created in call.creates:
            if created.alias_of is not None and created.alias_of not in call.reads:
                raise LowtideError(f"{call.name} returns an alias of %{created.alias_of}, which it does not read")
            self._make(created.tensor)

    def _make(self, tensor: int) -> None:
        if tensor in self.made:
            raise LowtideError(f"%{tensor} is made a second time")
        self.made.add(tensor)
        self.live.add(tensor)

    def _expect(self, tensor: int, who: str) -> None:
        if tensor not in self.live:
            state = "was released" if tensor in self.made else "was never made"
            raise LowtideError(f"{who} %{tensor}, which {state}")


def check_trace(trace: Trace) -> None:
    """Raises ``LowtideError`` that names the first wrong event."""
    checker = Checker()
    for position, event in enumerate(trace.events):
        try:
            checker.step(event)
        except LowtideError as error:
            raise LowtideError(f"event {position} of the trace: {error}.") from error
