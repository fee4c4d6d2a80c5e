"""Runs that go to all cores."""

from __future__ import annotations

import threading

import pytest

from lowtide.solve.threads import in_threads


@pytest.mark.parametrize("possible", [0, 1])
def test_where_threads_cannot_be_started_runs_are_in_this_one(possible: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose memory or number of threads is limited, when a lower plan is made because memory ran out."""
    start, left = threading.Thread.start, [possible]

    def limited(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    monkeypatch.setattr("lowtide.solve.threads.available_cores", lambda: 4)
    assert in_threads(lambda one: one * one, range(5)) == [0, 1, 4, 9, 16]


def test_an_error_of_a_run_is_raised() -> None:
    def run(one: int) -> float:
        return 1 / one

    with pytest.raises(ZeroDivisionError):
        in_threads(run, range(-1, 3))
