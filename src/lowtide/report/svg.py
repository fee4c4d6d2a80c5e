"""Charts as SVG text: scales, axes, lines. No dependency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources

from lowtide.units import largest_unit

_HEADROOM = 1.08


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a picture. ``across`` and ``up``: how many labels fit on its axes."""

    width: int
    height: int
    across: int
    up: int
    class_: str


SIZES = (Size(960, 360, 8, 5, "wide"), Size(390, 300, 4, 4, "narrow"))


def read_template(name: str) -> str:
    """The text of a file in ``templates``."""
    return resources.files("lowtide.report").joinpath("templates", name).read_text(encoding="utf-8")


class Chart:
    """A picture with a plot area for values up to ``largest_x`` and ``largest_y``. Drawing adds to ``parts``."""

    left = 64

    def __init__(
        self, size: Size, largest_x: float, largest_y: float, *, reversed_x: bool = False, top: int = 28
    ) -> None:
        self.size, self.largest_x, self.largest_y, self.reversed_x = size, largest_x, largest_y * _HEADROOM, reversed_x
        self.top = top
        self.right, self.floor = size.width - 24, size.height - 58
        self.parts: list[str] = []

    def x(self, value: float) -> float:
        share = value / self.largest_x if self.largest_x else 0.0
        return round(self.left + (self.right - self.left) * (1 - share if self.reversed_x else share), 1)

    def y(self, value: float) -> float:
        return round(self.floor - (self.floor - self.top) * value / self.largest_y, 1)

    def draw(self, name: str, content: str = "", **attributes: object) -> None:
        """``draw("rect", x=1, class_="area")`` adds ``<rect x="1" class="area"/>``; underscores become dashes."""
        self.parts.append(_tag(name, content, attributes))

    def text(self, x: float, y: float, words: str, class_: str, anchor: str = "start") -> None:
        self.draw("text", escape(words), x=round(x, 1), y=round(y, 1), class_=class_, text_anchor=anchor)

    def level(self, value: float, class_: str) -> float:
        """Draw a line across the plot area; returns its height."""
        y = self.y(value)
        self.draw("line", x1=self.left, x2=self.right, y1=y, y2=y, class_=class_)
        return y

    def boundary(self, value: float) -> None:
        """Mark the start of the backward pass."""
        x = self.x(value)
        self.draw("line", x1=x, x2=x, y1=self.top - 12, y2=self.floor, class_="boundary")
        self.text(x - 6, self.top - 8, "forward", "tick", "end")
        self.text(x + 6, self.top - 8, "backward", "tick")

    def axes(self, across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]], below: str = "") -> None:
        """Horizontal grid lines with labels on the left, labels below, and the meaning of these under them."""
        for value, label in up:
            self.text(self.left - 8, self.level(value, "grid") + 4, label, "tick", "end")
        for value, label in across:
            self.text(self.x(value), self.floor + 20, label, "tick", "middle")
        if below:
            self.text(self.right, self.size.height - 6, below, "tick", "end")

    def staircase(self, levels: Sequence[int], slices: int, class_: str, *, closed: bool = False) -> None:
        """A line with one level in each of ``slices``; ``closed``: down to the floor at both ends."""
        path, end = "", 0
        for level, group in itertools.groupby(levels):
            end += len(list(group))
            path += f"V{self.y(level)}H{self.x(self.largest_x * end / slices)}"
        if path:
            start = f"M{self.x(0)} "
            path = f"{start}{self.floor}{path}V{self.floor}Z" if closed else start + path.removeprefix("V")
        self.draw("path", d=path, class_=class_)

    def picture(self, title: str, style: str = "") -> str:
        """The whole SVG element. ``title`` is its name for screen readers."""
        size = self.size
        attributes: dict[str, object] = {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {size.width} {size.height}",
            "class": f"chart {size.class_}",
            "role": "img",
            "aria-label": title,
            "data-left": self.left,
            "data-right": size.width - self.right,
            "data-top": self.top,
            "data-floor": self.floor,
            "data-high": self.largest_y,
        }
        head = _tag("title", escape(title), {}) + (f"<style>{style}</style>" if style else "")
        return _tag("svg", head + "".join(self.parts), attributes)


def _tag(name: str, content: str, attributes: Mapping[str, object]) -> str:
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def ticks(largest: float, count: int, units: Mapping[str, int]) -> list[tuple[float, str]]:
    """About ``count`` round numbers up to ``largest`` with their labels, in one of ``units``. They are multiples of 1,
    2 or 5 times a power of ten."""
    unit, scale = largest_unit(largest, units)
    raw = largest / scale / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999999)
    amounts = [round(step * index, 10) for index in range(int(largest / scale / step + 1e-9) + 1)]
    return [(amount * scale, f"{amount:g} {unit}") for amount in amounts]
