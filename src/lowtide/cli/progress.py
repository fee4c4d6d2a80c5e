"""Progress on a terminal: the library calls back, this draws."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from lowtide.extras import require

Progress = Callable[[str, float], None]


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress | None]:
    """A callback that moves a bar on stderr; ``None`` where stderr is no terminal or ``rich`` is not installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield None
        return
    rich_progress, console = require("rich.progress"), require("rich.console")
    with rich_progress.Progress(console=console.Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda stage, fraction: bar.update(task, description=stage, completed=fraction)
