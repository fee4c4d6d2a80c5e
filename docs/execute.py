"""Run the Python in documentation pages, and compare what it prints with what the page says.

``python docs/execute.py PAGE...``, by default every page that has Python: its blocks of ``python`` run in order, in one
namespace that begins with the names of ``docs/setup.py``, and in an empty folder. Where a block of ``text`` follows, it must
be what was printed; ``...`` in it stands for anything, and spaces count as one. ``text varies`` shows what one machine
printed, and is not compared. Comments say what readers need not see: ``<!-- python`` begins code that runs in its place, and
``<!-- needs: NAMES -->`` names the libraries without which the page is left out, which is said.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^(?:```(\w*(?: varies)?)\n(.*?)^```|<!-- python\n(.*?)^-->)$", re.MULTILINE | re.DOTALL)
_NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def pages() -> list[Path]:
    """Those that have Python."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "\n```python\n" in page.read_text(encoding="utf-8")]


def missing(path: Path) -> list[str]:
    """The libraries that the page needs and that are not installed."""
    needs = ",".join(_NEEDS.findall(path.read_text(encoding="utf-8"))).replace(" ", "").split(",")
    return [name for name in needs if name and importlib.util.find_spec(name) is None]


def examples(page: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, code, expected output or ``None``) of each block of Python."""
    blocks = []
    for match in _FENCE.finditer(page):
        language = "python" if match[1] is None else match[1]
        blocks.append((page.count("\n", 0, match.start()) + 2, language, match[2] or match[3] or ""))
    for (line, language, code), (_, following, output) in zip(blocks, [*blocks[1:], (0, "", "")], strict=True):
        if language == "python":
            yield line, code, output if following == "text" else None


def execute(path: Path) -> list[str]:
    """What is wrong with the page, a text per block."""
    page, failures = path.read_text(encoding="utf-8"), []
    namespace: dict[str, object] = {"__name__": "__main__"}
    setup = ROOT / "docs" / "setup.py"
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            _printed(compile(setup.read_text(encoding="utf-8"), setup.name, "exec"), namespace)
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


def main(names: list[str]) -> int:
    failures = []
    for page in [Path(name) for name in names] or pages():
        lacking = missing(page)
        if lacking:
            sys.stderr.write(f"{page}: left out, since {', '.join(lacking)} is not installed\n")
            continue
        failures += execute(page)
    sys.stderr.write("".join(f"{failure}\n" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
