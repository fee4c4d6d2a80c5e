"""A bar where somebody sees it, one at a time, gone at the end; nothing elsewhere."""

from __future__ import annotations

import io
import sys
import types
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


class _Handle:
    def __init__(self, shown: list[dict[str, str]]) -> None:
        self.shown = shown

    def update(self, bundle: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


def _notebook(monkeypatch: pytest.MonkeyPatch, *, kernel: bool = True) -> list[dict[str, str]]:
    """IPython as a kernel has it; returns what the one output below the cell shows, one after the other."""
    shown: list[dict[str, str]] = []

    def display(bundle: dict[str, str], *, raw: bool, display_id: bool) -> _Handle:
        assert raw and display_id and not shown
        shown.append(bundle)
        return _Handle(shown)

    ipython, shell = types.ModuleType("IPython"), types.SimpleNamespace(**({"kernel": object()} if kernel else {}))
    ipython.get_ipython = lambda: shell  # type: ignore[attr-defined]
    ipython_display = types.ModuleType("IPython.display")
    ipython_display.display = display  # type: ignore[attr-defined]
    modules = {"ipykernel": types.ModuleType("ipykernel"), "IPython": ipython, "IPython.display": ipython_display}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    return shown


def test_a_notebook_has_a_bar_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch)
    with progress_bar("<Net>") as bar:
        assert bar is not None
        bar("search", 0.25)
        for step in range(1000):
            bar("search", step / 2000)
        bar("lowering", 1.0)
    texts = [bundle["text/plain"] for bundle in shown]
    assert texts[:2] == ["<Net> 0.0 %", "<Net>: search 25.0 %"]
    assert texts[-2:] == ["<Net>: lowering 100.0 %", ""]
    assert len(shown) < 500  # not a message for every step of a search
    assert "&lt;Net&gt;: search" in shown[1]["text/html"] and 'style="width: 25%"' in shown[1]["text/html"]
    assert shown[-1]["text/html"] == ""


def test_whatever_takes_long_shows_its_stages_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch)
    plan = lowtide.plan(WithLoss(perceptron(2)), (torch.randn(4, 32),), budget="100%", planner="greedy")
    assert any("WithLoss: " in bundle["text/plain"] for bundle in shown) and shown[-1]["text/html"] == ""
    shown.clear()
    plan.curve(points=2, planner="greedy")
    assert any(": planning at several budgets" in bundle["text/plain"] for bundle in shown)
    shown.clear()
    told: list[str] = []
    plan.curve(points=2, planner="greedy", on_progress=lambda stage, fraction: told.append(stage))
    assert told and shown == []


def test_a_bar_in_a_notebook_goes_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch)
    with pytest.raises(KeyboardInterrupt), progress_bar():
        raise KeyboardInterrupt
    assert shown[-1] == {"text/html": "", "text/plain": ""}


def test_rematerialize_in_a_notebook_shows_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch)
    lowtide.rematerialize(WithLoss(perceptron(2)), (torch.randn(4, 32),), budget="100%")
    assert any("WithLoss: " in bundle["text/plain"] for bundle in shown)
    assert shown[-1]["text/html"] == ""


def test_ipython_on_a_terminal_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _notebook(monkeypatch, kernel=False)
    with progress_bar() as bar:
        assert bar is None
    assert shown == []
