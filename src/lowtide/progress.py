"""Progress for people: a bar on a terminal or in a notebook. Elsewhere, the log reports it."""

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
_LEAST_SECONDS = 0.1  # between updates of a notebook's bar in one stage: each is a message


@contextlib.contextmanager
def progress_bar(title: str = "") -> Iterator[Progress | None]:
    """A callback that moves a bar on a terminal or below a notebook's cell; ``None`` if there is neither, or ``rich``,
    which draws the bar on a terminal, is not installed."""
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
    """Whether a notebook kernel, which shows HTML, runs this process; not IPython on a terminal."""
    if "ipykernel" not in sys.modules:
        return False
    shell = import_module("IPython").get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextlib.contextmanager
def _notebook_bar(title: str) -> Iterator[Progress]:
    """A bar below the running cell, removed at the end. It needs no widgets: one output is replaced."""
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
    """The bar as HTML, and as text for frontends without HTML."""
    return {"text/html": notebook.bar(words, fraction), "text/plain": f"{words} {format_percent(fraction)}".strip()}


@contextlib.contextmanager
def shown(title: str) -> Iterator[None]:
    """A context in which a bar shows what is passed to ``report``. Inside another one, that one's bar is used."""
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
    """A context that yields ``on_progress``, or a callback to the bar of ``shown`` if it is ``None``."""
    if on_progress is not None:
        yield on_progress
        return
    with shown(title):
        yield report


def report(stage: str, fraction: float) -> None:
    """Tell the bars that are shown the current stage and how much of it is done."""
    for bar in _shown:
        bar(stage, fraction)
