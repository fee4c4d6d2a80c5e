"""Run the Python in documentation pages, and compare what it prints with what the page says.

``python docs/execute.py PAGE...``: every block of ``python`` on a page runs, in order, in one namespace and an empty folder.
Where a block of ``text`` follows, it must be what was printed; ``...`` in it stands for anything, and spaces count as one.
``text varies`` shows what one machine printed, and is not compared.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^```(\w*(?: varies)?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(page: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, code, expected output or ``None``) of each block of Python."""
    blocks = [(page.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in _FENCE.finditer(page)]
    for (line, language, code), (_, following, output) in zip(blocks, [*blocks[1:], (0, "", "")], strict=True):
        if language == "python":
            yield line, code, output if following == "text" else None


def execute(path: Path) -> list[str]:
    """What is wrong with the page, a text per block."""
    page, failures = path.read_text(encoding="utf-8"), []
    namespace: dict[str, object] = {"__name__": "__main__"}
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for line, code, expected in examples(page):
                printed = _printed(compile("\n" * (line - 1) + code, path.name, "exec"), namespace)
                if expected is not None and not doctest.OutputChecker().check_output(expected, printed, _FLAGS):
                    failures.append(f"{path}:{line}: the page says\n{expected}but this was printed\n{printed}")
        finally:
            os.chdir(before)
    return failures


def _printed(code: object, namespace: dict[str, object]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)  # type: ignore[arg-type]
    return output.getvalue()


def main(pages: list[str]) -> int:
    failures = [failure for page in pages for failure in execute(Path(page))]
    sys.stderr.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
