"""Results as cards in notebooks: self-contained HTML in the notebook's own colours.

Every colour is the notebook's text colour, partly transparent, or a tone that is readable on white and on black. So a
card is readable even if the notebook is dark and the system is light, unlike with styles that follow the system.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from html import escape

_STYLE = """
.lowtide {
  --ink: currentColor; --card: transparent; --line: color-mix(in srgb, currentColor 20%, transparent);
  --muted: color-mix(in srgb, currentColor 70%, transparent);
  --plan: #2f86d6; --soft: #2f86d62e; --plain: #868f9b; --budget: #d9601f; --again: #c77f16; --measured: #1a9a78;
  --kept: #2f86d6; --passing: #8fb4d3; --recomputed: #c77f16; --fetched: #c2417a;
  --backward: #9a70d2; --gradient: #1a9a78; --other: #868f9b;
  color-scheme: inherit; color: inherit; max-width: 60rem; font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif;
}
.lowtide .heading { font-weight: 650; margin: .2rem 0 .4rem; overflow-wrap: anywhere; }
.lowtide .note { color: var(--muted); font-size: .92em; margin: .3rem 0; }
.lowtide .scroll { overflow-x: auto; }
.lowtide table { border-collapse: collapse; margin: 0; font: inherit; color: inherit; background: none; }
.lowtide tr, .lowtide tr:nth-child(even) { background: none; }
.lowtide th, .lowtide td { padding: .15rem .9rem .15rem 0; border: 0; border-bottom: 1px solid var(--line); text-align: left; }
.lowtide th { color: var(--muted); font-weight: 400; }
.lowtide td { font-variant-numeric: tabular-nums; }
.lowtide .number { text-align: right; white-space: nowrap; }
.lowtide details { margin: .4rem 0; }
.lowtide summary { cursor: pointer; }
.lowtide figure { margin: .6rem 0 0; }
.lowtide svg { display: block; width: 100%; height: auto; }
.lowtide .track { height: .5rem; border-radius: .25rem; background: var(--line); overflow: hidden; }
.lowtide .done { height: 100%; background: var(--plan); }
"""


class Shown:
    """A result that notebooks show as a card: its ``_heading``, and its ``_facts`` by name, as ``str`` prints them."""

    __slots__ = ()

    @abstractmethod
    def _heading(self) -> str: ...

    @abstractmethod
    def _facts(self) -> Mapping[str, str]: ...

    def _repr_html_(self) -> str:
        return card(self._heading(), facts_table(self._facts()))


def card(heading: str, *parts: str) -> str:
    """HTML of a heading with ``parts`` below it."""
    return f'<div class="lowtide"><style>{_STYLE}</style><div class="heading">{escape(heading)}</div>{"".join(parts)}</div>'


def facts_table(facts: Mapping[str, str]) -> str:
    """A table with a row for each fact; empty if there are none."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in facts.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table whose first row is the header. The first ``left`` columns are left-aligned, the others right-aligned."""

    def line(row: Sequence[str], tag: str) -> str:
        numbers = [' class="number"' if column >= left else "" for column in range(len(row))]
        cells = (f"<{tag}{class_}>{escape(text)}</{tag}>" for text, class_ in zip(row, numbers, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows[1:])
    return f'<div class="scroll"><table><thead>{line(rows[0], "th")}</thead><tbody>{body}</tbody></table></div>'


def folded(summary: str, content: str) -> str:
    """Content that is shown after a click on ``summary``."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def picture(svg: str, style: str, caption: str) -> str:
    """A chart with its style, and a caption that explains its lines."""
    return f"<figure><style>{style}</style>{svg}</figure>{note(caption)}"


def note(text: str) -> str:
    return f'<div class="note">{escape(text)}</div>'


def bar(words: str, fraction: float) -> str:
    """A progress bar below ``words``, filled to ``fraction``."""
    share = round(100 * min(max(fraction, 0.0), 1.0))
    track = f'<div class="track"><div class="done" style="width: {share}%"></div></div>'
    return card(words, f'<div role="progressbar" aria-valuenow="{share}" aria-label="{escape(words)}">{track}</div>')
