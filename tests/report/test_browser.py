"""Pages in a real browser, where there is one: nothing on the console, nothing asked of a network, usable by keyboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.reports import HOSTILE, plan_report, small_plan, trace_report, write_page
from tests.support.browser import Page, browser_path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser_path() is None, reason="no browser is installed")]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1100, 360])
def test_quiet_and_wide_enough(tmp_path: Path, width: int, dark: bool) -> None:
    for report in (plan_report(), trace_report(), plan_report(HOSTILE)):
        path = write_page(tmp_path, report)
        with Page(width, 800, dark=dark) as page:
            page.open(path)
            assert page.complaints == []
            assert page.requests == [path.resolve().as_uri()]
            page.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
            assert page.run("document.documentElement.scrollWidth") <= width
            shown = "narrow" if width < 600 else "wide"
            charts = "[...document.querySelectorAll('svg.chart')].filter(e => getComputedStyle(e).display !== 'none')"
            assert set(page.run(f"{charts}.map(e => e.classList[1])")) == {shown}
            background = page.run("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, background[4:-1].split(","))) < 200) == dark


def test_keyboard(tmp_path: Path) -> None:
    with Page() as page:
        page.open(write_page(tmp_path, plan_report()))
        page.run("document.getElementById('walk').focus()")
        words = page.run("document.getElementById('here').textContent")
        page.press("Home")
        first = page.run("document.getElementById('here').textContent")
        page.press("End")
        last = page.run("document.getElementById('walk').getAttribute('aria-valuetext')")
        assert "layers.0.linear" in first
        assert len({words, first, last}) == 3
        page.press("ArrowLeft")
        assert page.run("+document.getElementById('walk').getAttribute('aria-valuenow')") == 598
        assert page.complaints == []


_POINT_AT_PICKED = """(() => {
  const svg = [...document.querySelectorAll('#map svg')].find(e => getComputedStyle(e).display !== 'none');
  const box = svg.querySelector('.picked').getBoundingClientRect();
  document.getElementById('lies').textContent = '';
  const at = {clientX: box.left + box.width / 2, clientY: box.top + box.height / 2, bubbles: true};
  svg.dispatchEvent(new PointerEvent('pointermove', at));
})()"""


def test_map_by_keyboard_and_pointer(tmp_path: Path) -> None:
    """The tensor that the keys reach is outlined, and is the one that lies under its own middle."""
    with Page() as page:
        page.open(write_page(tmp_path, plan_report()))
        page.run("document.getElementById('map').scrollIntoView()")
        page.run("document.getElementById('map').focus()")
        seen = set()
        for key in ("Home", "ArrowRight", "PageUp", "ArrowLeft", "End"):
            page.press(key)
            words = page.run("document.getElementById('lies').textContent")
            seen.add(words)
            page.run(_POINT_AT_PICKED)
            assert page.run("document.getElementById('lies').textContent") == words
        assert len(seen) == 4  # of 24 tensors, the last twice
        assert page.complaints == []


@pytest.mark.parametrize("dark_system", [False, True])
@pytest.mark.parametrize(("ink", "paper"), [("rgb(17, 17, 17)", "#fff"), ("rgb(238, 238, 238)", "#111")])
def test_cards_have_the_colours_of_their_notebook(tmp_path: Path, ink: str, paper: str, dark_system: bool) -> None:
    plan = small_plan(HOSTILE)
    assert plan.known_curve is not None
    cards = plan._repr_html_() + plan.known_curve._repr_html_()
    path = tmp_path / "notebook.html"
    path.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><body style="color: {ink}; background: {paper}">{cards}',
        encoding="utf-8",
    )
    with Page(700, 800, dark=dark_system) as page:
        page.open(path)
        assert page.complaints == []
        assert page.requests == [path.resolve().as_uri()]
        assert page.run("document.documentElement.scrollWidth") <= 700
        found = "[...document.querySelectorAll('.lowtide td')].map(e => getComputedStyle(e).color)"
        assert set(page.run(found)) == {ink}
        assert page.run("getComputedStyle(document.querySelector('.budget-label')).fill") == "rgb(217, 96, 31)"
        assert page.run("document.querySelectorAll('.lowtide svg').length") == 2
