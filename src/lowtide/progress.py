"""Progress where people see it: a bar on a terminal or in a notebook; elsewhere the log tells."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec

from lowtide import notebook
from lowtide.extras import require
from lowtide.units import format_percent

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the fraction of it that is done (0 to 1)."""
_shown: list[Progress] = []
_LEAST_SECONDS = 0.1  # between two looks of a bar in a notebook at the same stage: each is a message


@contextlib.contextmanager
def progress_bar(title: str = "") -> Iterator[Progress | None]:
    """A callback that moves a bar, below the cell of a notebook or on a terminal; ``None`` where nobody sees one, or ``rich``,
    which draws it on a terminal, is not installed."""
    if _in_notebook():
        with _notebook_bar(title) as bar:
            yield bar
        return
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield None
        return
    rich_progress, console = require("rich.progress"), require("rich.console")
    with rich_progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        yield lambda stage, fraction: bar.update(task, description=_words(title, stage), completed=fraction)


def _words(title: str, stage: str) -> str:
    return f"{title}: {stage}" if title else stage


def _in_notebook() -> bool:
    """Whether a kernel, which shows HTML, runs this process: not IPython on a terminal."""
    if "ipykernel" not in sys.modules:
        return False
    shell = import_module("IPython").get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def _notebook_bar(title: str) -> Iterator[Progress]:
    """A bar below the running cell, gone at the end. It needs no widgets: one output, which is replaced."""
    display = import_module("IPython.display").display
    handle = display(_bundle(title, 0.0), raw=True, display_id=True)
    shown_stage, shown_at = "", 0.0

    def move(stage: str, fraction: float) -> None:
        nonlocal shown_stage, shown_at
        now = time.monotonic()
        if stage != shown_stage or fraction >= 1 or now - shown_at >= _LEAST_SECONDS:
            shown_stage, shown_at = stage, now
            handle.update(_bundle(_words(title, stage), fraction), raw=True)

    try:
        yield move
    finally:
        handle.update({"text/html": "", "text/plain": ""}, raw=True)


def _bundle(words: str, fraction: float) -> dict[str, str]:
    """For notebooks, and as text for what shows none of HTML."""
    return {"text/html": notebook.bar(words, fraction), "text/plain": f"{words} {format_percent(fraction)}".strip()}


@contextlib.contextmanager
def shown(title: str) -> Iterator[None]:
    """Inside, a bar shows what is ``report``ed; where one is shown already, that one does."""
    if _shown:
        yield
        return
    with progress_bar(title) as bar:
        if bar is None:
            yield
            return
        _shown.append(bar)
        try:
            yield
        finally:
            _shown.remove(bar)


@contextlib.contextmanager
def told(title: str, on_progress: Progress | None) -> Iterator[Progress]:
    """Who hears of the progress inside: ``on_progress`` where there is one, else the bar that is ``shown``."""
    if on_progress is not None:
        yield on_progress
        return
    with shown(title):
        yield report


def report(stage: str, fraction: float) -> None:
    """Tell the bar that is shown, if one is, what is being done and how far that has come."""
    for bar in _shown:
        bar(stage, fraction)
