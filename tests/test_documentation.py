"""The pages: links lead somewhere, examples print what they say, public names are described, the site builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import lowtide

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
_LINK = re.compile(r"\]\(([^)#\s]+)")
_SLOW = {
    *("quickstart.md", "custom-kernels.md", "parts.md", "walkthrough.md"),
    *("budgets.md", "slower.md", "why-not-checkpointing.md", "lengths.md"),
    *("checkpoints.md", "chunked-loss.md", "max-batch.md", "offload.md", "optimizer.md"),
    *("trainer.md", "lightning.md", "accelerate.md", "diffusers.md", "compile.md", "several-gpus.md"),
}


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


execute = _load(DOCS / "execute.py")


@pytest.fixture(autouse=True, scope="module")
def brief_searches() -> None:
    """Pages say what is found by default."""


def _executed(page: Path) -> object:
    return pytest.param(page, id=page.name, marks=[pytest.mark.slow] if page.name in _SLOW else [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_on_the_site() -> None:
    contents = (DOCS / "contents.rst").read_text(encoding="utf-8")
    names = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]
    listed = [str(name) for name in names if f"   {name}\n" in contents or f"   {name.parent}/*\n" in contents]
    assert listed == [str(name) for name in names]


def test_every_question_is_asked_on_the_first_page() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = [str(page.relative_to(DOCS)) for page in (DOCS / "guides").glob("*.md")]
    assert len(pages) > 10
    assert [page for page in pages if f"({page})" not in index] == []


def test_every_public_name_is_described() -> None:
    described = (DOCS / "api.rst").read_text(encoding="utf-8")
    errors = vars(lowtide.errors)
    names = [name for name in lowtide.__all__ if name not in errors]
    assert len(names) > 10 and ".. automodule:: lowtide.errors" in described
    assert [name for name in names if not re.search(rf":: lowtide\.{name}\n", described)] == []


@pytest.mark.parametrize("page", [_executed(page) for page in execute.pages()])
def test_examples(page: Path) -> None:
    if lacking := execute.missing(page):
        pytest.skip(f"{', '.join(lacking)} not installed")
    if page.name not in _SLOW:
        assert execute.execute(page) == []
        return
    done = subprocess.run(
        [sys.executable, "docs/execute.py", str(page)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_what_pages_say_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- python\nn = 3\n-->\n\n```\nno Python\n```\n\n```python\nprint(n)\n```\n\n```text\n4\n```\n")
    (failure,) = execute.execute(page)
    assert f"{page}:10: the page says\n4\nbut this was printed\n3\n" in failure
    page.write_text(page.read_text().replace("4", "3"))
    assert execute.execute(page) == []


def test_a_library_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- needs: json, no_such_library -->\n\n```python\nimport no_such_library\n```\n")
    assert execute.missing(page) == ["no_such_library"]
    assert execute.main([str(page)]) == 0
    assert "left out, since no_such_library is not installed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="the tools of make docs are not installed")
def test_site(tmp_path: Path) -> None:
    options = ["--fail-on-warning", "--keep-going", "--fresh-env", "-q", "--conf-dir", "docs", "--builder", "html"]
    command = [sys.executable, "-m", "sphinx", *options, ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "docs/index.html", "docs/api.html", "docs/guides/trainer.html"):
        assert (tmp_path / page).is_file()
