"""Small plots as SVG text, coloured by the page's style sheet, so that they follow light and dark.

Sizes are user units of a view box 560 wide. Every mark carries a `<title>`, which browsers show on hovering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 560.0
HEIGHT: Final = 220.0
LEFT: Final = 56.0
RIGHT: Final = 12.0
TOP: Final = 14.0
BOTTOM: Final = 30.0
FEW_BARS: Final = 14
HALF: Final = 5
LABELLED: Final = 16
LONGEST_NAME: Final = 24
Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Mark:
    """One value to draw: where, how much, and what to say on hovering."""

    at: float
    value: float
    hint: str


@dataclass(frozen=True, slots=True)
class Range:
    """One named spread: p50, p95 and p99."""

    name: str
    p50: float
    p95: float
    p99: float
    hint: str


def plain(value: float) -> str:
    """A number on an axis: 1.2k, 3M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def nice_ticks(top: float, wanted: int = 4) -> list[float]:
    """Round values from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / wanted
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def _svg(parts: Iterable[str], label: str, height: float = HEIGHT) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def _frame(ticks: Sequence[float], y: Callable[[float], float], form: Format) -> list[str]:
    lines = []
    for tick in ticks:
        at = y(tick)
        lines.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(
            f'<text class="tick" x="{LEFT - 7:g}" y="{at + 4:.1f}" text-anchor="end">{form(tick)}</text>'
        )
    return lines


def _below(at: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="tick" x="{at:.1f}" y="{HEIGHT - 9:g}" text-anchor="{anchor}">{escape(text)}</text>'


def area(marks: Sequence[Mark], label: str, hue: str, x_form: Format, y_form: Format = plain) -> str:
    """Values over time; `at` runs evenly."""
    ticks = nice_ticks(max((mark.value for mark in marks), default=0.0))
    first, last = marks[0].at, marks[-1].at
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(at: float) -> float:
        return LEFT + wide * (at - first) / ((last - first) or 1.0)

    def y(value: float) -> float:
        return TOP + high * (1 - value / ticks[-1])

    points = " ".join(f"{x(mark.at):.1f},{y(mark.value):.1f}" for mark in marks)
    parts = _frame(ticks, y, y_form)
    parts.append(
        f'<polygon class="area {hue}" points="{LEFT:g},{y(0):.1f} {points} {x(last):.1f},{y(0):.1f}"/>'
    )
    parts.append(f'<polyline class="line {hue}" points="{points}"/>')
    step = wide / max(1, len(marks) - 1)
    for mark in marks:
        parts.append(
            f'<rect class="hover" x="{x(mark.at) - step / 2:.1f}" y="{TOP:g}" width="{step:.1f}" height="{high:g}">'
            f"<title>{escape(mark.hint)}</title></rect>"
        )
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(_below(LEFT + wide * part, x_form(first + (last - first) * part), anchor))
    return _svg(parts, label)


def histogram(marks: Sequence[Mark], label: str, hue: str, x_form: Format) -> str:
    """Counts of times on a logarithmic axis; `at` is the lower edge of a bar, each a tenth of a decade wide."""
    ticks = nice_ticks(max((mark.value for mark in marks), default=0.0))
    low = round(math.log10(marks[0].at) * 10)
    high_edge = round(math.log10(marks[-1].at) * 10) + 1
    bars = max(8, high_edge - low)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = wide / bars

    def y(value: float) -> float:
        return TOP + high * (1 - value / ticks[-1])

    parts = _frame(ticks, y, plain)
    for mark in marks:
        x = LEFT + step * (round(math.log10(mark.at) * 10) - low)
        parts.append(
            f'<rect class="bar {hue}" x="{x + 0.5:.1f}" y="{y(mark.value):.1f}" width="{max(step - 1, 1):.1f}" '
            f'height="{y(0) - y(mark.value):.1f}"><title>{escape(mark.hint)}</title></rect>'
        )
    for tenth in range(low, low + bars + 1):
        if tenth % 10 == 0 or (bars < FEW_BARS and tenth % 10 == HALF):
            at = LEFT + step * (tenth - low)
            parts.append(
                f'<line class="stub" x1="{at:.1f}" x2="{at:.1f}" y1="{y(0):.1f}" y2="{y(0) + 4:.1f}"/>'
            )
            parts.append(_below(at, x_form(float(f"{10 ** (tenth / 10):.1g}"))))
    return _svg(parts, label)


def columns(marks: Sequence[Mark], label: str, hue: str) -> str:
    """Counts of small whole numbers."""
    ticks = nice_ticks(max((mark.value for mark in marks), default=0.0))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    step = wide / max(len(marks), 4)

    def y(value: float) -> float:
        return TOP + high * (1 - value / ticks[-1])

    parts = _frame(ticks, y, plain)
    for index, mark in enumerate(marks):
        x = LEFT + step * index
        parts.append(
            f'<rect class="bar {hue}" x="{x + step * 0.15:.1f}" y="{y(mark.value):.1f}" width="{step * 0.7:.1f}" '
            f'height="{y(0) - y(mark.value):.1f}"><title>{escape(mark.hint)}</title></rect>'
        )
        if len(marks) <= LABELLED or index % 5 == 0:
            parts.append(_below(x + step / 2, f"{mark.at:g}"))
    return _svg(parts, label)


def stacked(parts_of: Sequence[tuple[str, float, str, str]], label: str) -> str:
    """One bar of shares: (name, value, class of colour, hint)."""
    total = sum(value for _, value, _, _ in parts_of) or 1.0
    at = 0.0
    drawn = []
    for _, value, hue, hint in parts_of:
        width = WIDTH * value / total
        drawn.append(
            f'<rect class="part {hue}" x="{at:.2f}" y="0" width="{max(0.0, width - 1.5):.2f}" height="34" rx="2">'
            f"<title>{escape(hint)}</title></rect>"
        )
        at += width
    return _svg(drawn, label, 34)


def ranges(rows: Sequence[Range], label: str, form: Format) -> str:
    """One line per name: a dot at p50, a thick line to p95, a thin one to p99."""
    row_height, left = 26.0, 180.0
    height = TOP + row_height * len(rows) + BOTTOM
    ticks = nice_ticks(max((row.p99 for row in rows), default=0.0))
    wide = WIDTH - left - 30

    def x(value: float) -> float:
        return left + wide * value / ticks[-1]

    parts = []
    for tick in ticks:
        at = x(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP:g}" y2="{height - BOTTOM:g}"/>'
        )
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - 10:g}" text-anchor="middle">{form(tick)}</text>'
        )
    for index, row in enumerate(rows):
        y = TOP + row_height * (index + 0.5)
        name = row.name if len(row.name) <= LONGEST_NAME else "…" + row.name[1 - LONGEST_NAME :]
        parts.append(
            f'<text class="name" x="{left - 10:g}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        parts.append(
            f'<g><title>{escape(row.hint)}</title><rect class="hover" x="0" y="{y - 13:.1f}" width="{WIDTH:g}" height="26"/>'
            f'<line class="thin" x1="{x(row.p95):.1f}" x2="{x(row.p99):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<line class="thick" x1="{x(row.p50):.1f}" x2="{x(row.p95):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<circle class="dot" cx="{x(row.p50):.1f}" cy="{y:.1f}" r="5"/></g>'
        )
    return _svg(parts, label, height)
