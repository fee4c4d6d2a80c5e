"""The pages: links lead somewhere, examples print what they say, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXECUTED = [
    *("quickstart.md", "walkthrough.md", "custom-kernels.md"),
    *(f"tutorials/{name}.md" for name in ("budget", "dynamic", "graphs")),
]
_LINK = re.compile(r"\]\(([^)#\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_on_the_site() -> None:
    contents = (ROOT / "docs" / "contents.rst").read_text(encoding="utf-8")
    names = [page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    listed = [str(name) for name in names if f"   {name}\n" in contents or f"   {name.parent}/*\n" in contents]
    assert listed == [str(name) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED)
def test_examples(page: str) -> None:
    command = [sys.executable, "docs/execute.py", f"docs/{page}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="the tools of make docs are not installed")
def test_site(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--fresh-env", "-q", "--conf-dir", "docs", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "docs/index.html", "docs/api.html", "docs/tutorials/budget.html"):
        assert (tmp_path / page).is_file()
