"""Drawing with SVG text: scales, axes, lines. No dependency."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from lowtide.units import largest_unit


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a chart's data go: a plot area inside a picture, with the largest values on both axes."""

    width: int
    height: int
    largest_x: float
    largest_y: float
    left: int = 64
    right: int = 16
    top: int = 28
    bottom: int = 44
    reversed_x: bool = False

    def x(self, value: float) -> float:
        share = value / self.largest_x if self.largest_x else 0.0
        room = self.width - self.left - self.right
        return round(self.left + room * (1 - share if self.reversed_x else share), 1)

    def y(self, value: float) -> float:
        share = value / self.largest_y if self.largest_y else 0.0
        return round(self.height - self.bottom - (self.height - self.top - self.bottom) * share, 1)

    @property
    def floor(self) -> float:
        return self.y(0)


def tag(name: str, content: str = "", **attributes: object) -> str:
    """``tag("rect", x=1, class_="area") == '<rect x="1" class="area"/>'``; underscores stand for dashes."""
    pairs = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items())
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def text(at_x: float, at_y: float, words: str, class_: str = "", anchor: str = "start") -> str:
    return tag("text", escape(words), x=round(at_x, 1), y=round(at_y, 1), class_=class_, text_anchor=anchor)


def picture(frame: Frame, parts: Iterable[str], title: str, class_: str = "", style: str = "") -> str:
    """The whole SVG element, named ``title`` for those who do not see it."""
    body = tag("title", escape(title)) + (f"<style>{style}</style>" if style else "") + "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {frame.height}" class="{class_}" role="img" '
        f'aria-label="{escape(title)}" data-left="{frame.left}" data-right="{frame.right}">{body}</svg>'
    )


def staircase(frame: Frame, levels: Sequence[int], slices: int, *, closed: bool = False) -> str:
    """The path of a line that keeps a level throughout each slice; ``closed``: down to the floor on both sides."""
    if not levels:
        return ""
    path = [f"M{frame.x(0)} {frame.floor}V{frame.y(levels[0])}" if closed else f"M{frame.x(0)} {frame.y(levels[0])}"]
    for index, level in enumerate(levels):
        ends = index + 1 == len(levels) or levels[index + 1] != level
        if ends:
            path.append(f"H{frame.x(frame.largest_x * (index + 1) / slices)}")
            path.append(f"V{frame.y(levels[index + 1])}" if index + 1 < len(levels) else "")
    return "".join(path) + (f"V{frame.floor}Z" if closed else "")


def ticks(largest: float, count: int, units: Mapping[str, int]) -> list[tuple[float, str]]:
    """Round amounts up to ``largest`` with their labels, about ``count`` of them, in one of ``units``."""
    unit, scale = largest_unit(largest, units)
    return [(amount * scale, f"{amount:g} {unit}") for amount in round_ticks(largest / scale, count)]


def round_ticks(largest: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from 0 to ``largest``, at most ``count`` beside the 0."""
    if largest <= 0:
        return [0.0]
    raw = largest / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999999)
    return [round(step * index, 10) for index in range(int(largest / step + 1e-9) + 1)]


def axes(frame: Frame, across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]]) -> list[str]:
    """Horizontal grid lines with labels on the left, labels below."""
    parts = []
    for value, label in up:
        at = frame.y(value)
        parts.append(tag("line", x1=frame.left, x2=frame.width - frame.right, y1=at, y2=at, class_="grid"))
        parts.append(text(frame.left - 8, at + 4, label, "tick", "end"))
    for value, label in across:
        parts.append(text(frame.x(value), frame.floor + 20, label, "tick", "middle"))
    return parts
