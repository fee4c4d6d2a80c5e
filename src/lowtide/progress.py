"""Progress where people see it: a bar on a terminal or in a notebook; elsewhere the log tells."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from lowtide.extras import require

Progress = Callable[[str, float], None]
"""Called with the name of a stage and the fraction of it that is done (0 to 1)."""
_shown: list[Progress] = []


@contextlib.contextmanager
def progress_bar(title: str = "") -> Iterator[Progress | None]:
    """A callback that moves a bar on stderr; ``None`` where nobody sees one, or ``rich`` is not installed."""
    if not (sys.stderr.isatty() or "ipykernel" in sys.modules) or find_spec("rich") is None:
        yield None
        return
    rich_progress, console = require("rich.progress"), require("rich.console")
    with rich_progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0)
        prefix = f"{title}: " if title else ""
        yield lambda stage, fraction: bar.update(task, description=f"{prefix}{stage}", completed=fraction)


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


def report(stage: str, fraction: float) -> None:
    """Tell the bar that is shown, if one is, what is being done and how far that has come."""
    for bar in _shown:
        bar(stage, fraction)
