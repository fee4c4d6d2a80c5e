"""Progress on a terminal: the library calls back, this draws."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from lowtide.extras import MissingExtraError, require

Progress = Callable[[str, float], None]


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A callback that moves a bar on stderr; ``None`` where stderr is no terminal or ``rich`` is not installed."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        rich_progress, console = require("rich.progress"), require("rich.console")
    except MissingExtraError:
        yield None
        return
    with rich_progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
