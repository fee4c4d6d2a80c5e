"""A bar where somebody sees it, one at a time, gone at the end; nothing elsewhere."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

import lowtide
from lowtide.progress import progress_bar, report, shown
from tests.support.networks import WithLoss, perceptron


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rematerialize_shows_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    lowtide.rematerialize(WithLoss(perceptron(2)), (torch.randn(4, 32),), budget="100%")
    text = terminal.getvalue()
    assert "WithLoss: " in text
    assert "lowering" in text or "search" in text or "measuring operators" in text


def test_nothing_is_written_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    lowtide.rematerialize(WithLoss(perceptron(2)), (torch.randn(4, 32),), budget="100%")
    assert capsys.readouterr() == ("", "")


def test_one_bar_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Bar:
        def __enter__(self) -> Any:
            return lambda stage, fraction: told.append((stage, fraction))

        def __exit__(self, *error: Any) -> None:
            told.append("gone")

    monkeypatch.setattr("lowtide.progress.progress_bar", lambda title: Bar())
    with shown("outer"):
        with shown("inner"):
            report("capture", 0.5)
        report("search", 1.0)
    report("unseen", 0.0)
    assert told == [("capture", 0.5), ("search", 1.0), "gone"]


def test_no_bar_without_a_terminal() -> None:
    with progress_bar() as bar:
        assert bar is None
