"""Text in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table_lines(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """The first row as a header, a line of dashes, and the other rows. The first ``left`` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.ljust(width) if i < left else c.rjust(width) for i, (c, width) in cells).rstrip())
    return lines


def fact_lines(facts: Mapping[str, str], indent: str = "  ") -> list[str]:
    """One line per name and value, with the values aligned."""
    width = max(map(len, facts))
    return [f"{indent}{name:<{width}}  {value}" for name, value in facts.items()]
