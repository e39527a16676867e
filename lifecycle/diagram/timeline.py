"""One rollout on a time line: a row per attempt, a coloured stretch per state, and every transition below."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lifecycle.diagram.chart import Chart
from lifecycle.diagram.markdown import grid
from lifecycle.diagram.overlay import seconds
from lifecycle.diagram.style import BAD, FAINT, INK, PAPER, SOFT, TOLD, TRIGGER_COLOUR, fill_of
from lifecycle.diagram.svg import element, serialise, text

_WIDTH, _LEFT, _RIGHT = 1100.0, 190.0, 24.0
_LANE, _BAR, _ROW = 46.0, 22.0, 16.0
_MOST_ROWS = 60
_MOST_TICKS = 8
_NUMBER_WIDTH = 12.0
_COLUMNS = (10, 40, 112, 178, 368, 408, 480, 560, 660)
_HEAD = ("", "at", "trigger", "from → to", "att.", "tokens", "after", "outcome", "reason, worker")


@dataclass(frozen=True)
class Step:
    """One line of the log about the rollout. `ts` is wall clock, seconds; `dwell_s` the time spent in `source`.

    A rollout that a process brought back from a snapshot has a step with the trigger `restored` and no `source`.
    """

    ts: float
    trigger: str
    source: str | None
    dest: str
    attempt: int
    tokens: int
    dropped_tokens: int
    dwell_s: float
    process_id: str
    worker: str | None = None
    reason: str | None = None
    outcome: str | None = None


@dataclass(frozen=True)
class _Stretch:
    """A stay in one state, from a step to the next."""

    state: str
    attempt: int
    start: float
    end: float
    worker: str | None


def timeline_dict(rollout_id: str, steps: Sequence[Step]) -> dict[str, Any]:
    """The steps as plain data."""
    return {"rollout_id": rollout_id, "steps": [asdict(step) for step in steps]}


def timeline_markdown(rollout_id: str, steps: Sequence[Step]) -> str:
    """The steps as a table."""
    rows = ([*row[:2], f"`{row[2]}`", *row[3:]] for row in _table(steps))
    return "\n".join([f"# Rollout `{rollout_id}`", "", _summary(steps), "", *grid(_HEAD, rows)]) + "\n"


def timeline_svg(rollout_id: str, steps: Sequence[Step], chart: Chart) -> str:
    """The picture. `chart` says which arcs are allowed; the others are drawn in red. `steps` must not be empty."""
    stretches = _stretches(steps)
    attempts = sorted({stretch.attempt for stretch in stretches})
    lanes = {attempt: 66 + at * _LANE for at, attempt in enumerate(attempts)}
    axis = 66 + len(attempts) * _LANE
    shown = min(len(steps), _MOST_ROWS)
    height = axis + 58 + (shown + 1) * _ROW + (_ROW if shown < len(steps) else 0)
    root = element("svg", width=_WIDTH, height=height, viewBox=f"0 0 {_WIDTH:.0f} {height:.0f}")
    root.append(element("rect", width="100%", height="100%", fill=PAPER))
    root.append(text(10, 22, f"Rollout {shorten(rollout_id, 80)}", font_size=15, font_weight="bold"))
    root.append(text(10, 42, _summary(steps), fill=SOFT))
    scale = _Scale(steps[0].ts - steps[0].dwell_s, max(stretch.end for stretch in stretches))
    root.extend(_axis(scale, axis))
    root.extend(_bars(stretches, lanes, scale, chart))
    root.extend(_flags(steps, lanes, scale, chart))
    root.extend(_listing(steps[:shown], chart, axis + 46))
    if shown < len(steps):
        more = f"… and {len(steps) - shown} more: `--format markdown` shows all"
        root.append(text(10, axis + 46 + (shown + 1) * _ROW, more, fill=SOFT))
    return serialise(root)


def shorten(value: str, most: int) -> str:
    """A text cut to fit, with a mark that it was."""
    return value if len(value) <= most else value[: most - 1] + "…"


@dataclass(frozen=True)
class _Scale:
    """From seconds to units of the picture."""

    start: float
    end: float

    def x(self, ts: float) -> float:
        span = self.end - self.start
        return _LEFT + (ts - self.start) / span * (_WIDTH - _LEFT - _RIGHT) if span > 0 else _LEFT

    def label(self, tick: float) -> str:
        """A tick in the one unit that suits the whole axis."""
        span = self.end - self.start
        unit, size = next(
            (pair for pair in (("h", 3600.0), ("min", 60.0), ("s", 1.0)) if span > 5 * pair[1]), ("ms", 1e-3)
        )
        return f"{tick / size:.4g} {unit}" if tick else "0"

    def ticks(self) -> Iterator[float]:
        span = self.end - self.start
        if span <= 0:
            yield 0.0
            return
        step = 10 ** math.floor(math.log10(span / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= _MOST_TICKS)
        if span > 300:  # noqa: PLR2004  whole minutes where the axis is in minutes or hours
            step = 60.0 * max(1, round(step / 60))
        for at in range(int(span / step) + 1):
            yield at * step


def _summary(steps: Sequence[Step]) -> str:
    first, last = steps[0], steps[-1]
    attempts = len({step.attempt for step in steps})
    workers = sorted({step.worker for step in steps if step.worker})
    dropped = sum(step.dropped_tokens for step in steps)
    parts = [
        f"{attempts} attempt{'s' if attempts != 1 else ''}",
        f"{len(steps)} transitions in {seconds(max(0.0, last.ts - first.ts + first.dwell_s))}",
        f"{last.tokens} tokens" + (f", {dropped} dropped" if dropped else ""),
        f"now {last.dest}",
        "workers: " + ", ".join(workers) if workers else "worker not known",
    ]
    return " · ".join(parts)


def _stretches(steps: Sequence[Step]) -> list[_Stretch]:
    """Stays between the steps; the last one has no end in the log and is drawn as a point."""
    found = []
    first = steps[0]
    if first.source is not None and first.dwell_s > 0:
        found.append(_Stretch(first.source, first.attempt, first.ts - first.dwell_s, first.ts, first.worker))
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        end = step.ts if after is None else max(step.ts, after.ts)
        worker = after.worker if after and after.worker else step.worker
        found.append(_Stretch(step.dest, step.attempt, step.ts, end, worker))
    return found


def _axis(scale: _Scale, y: float) -> Iterator[ET.Element]:
    for tick in scale.ticks():
        x = f"{scale.x(scale.start + tick):.1f}"
        yield element("line", x1=x, x2=x, y1=56, y2=f"{y:.1f}", stroke="#eaeef2", stroke_width=1)
        yield text(float(x), y + 14, scale.label(tick), fill=SOFT, font_size=9, text_anchor="middle")


def _bars(
    stretches: Sequence[_Stretch], lanes: dict[int, float], scale: _Scale, chart: Chart
) -> Iterator[ET.Element]:
    named: set[int] = set()
    for stretch in stretches:
        y, left = lanes[stretch.attempt], scale.x(stretch.start)
        width = max(scale.x(stretch.end) - left, 2.0)
        fill = fill_of(chart, stretch.state)
        bar = element(
            "rect", x=f"{left:.1f}", y=y, width=f"{width:.1f}", height=_BAR, fill=fill, stroke=FAINT
        )
        bar.append(element("title", f"{stretch.state}, {seconds(stretch.end - stretch.start)}"))
        yield bar
        if width > len(stretch.state) * 6 + 10:
            yield text(left + width / 2, y + 15, stretch.state, text_anchor="middle", font_size=9.5)
        if stretch.attempt not in named:
            named.add(stretch.attempt)
            worker = next((s.worker for s in stretches if s.attempt == stretch.attempt and s.worker), "")
            yield text(10, y + 10, f"attempt {stretch.attempt}", font_weight="bold")
            yield text(10, y + 22, shorten(worker, 32), fill=SOFT, font_size=9)


def _flags(
    steps: Sequence[Step], lanes: dict[int, float], scale: _Scale, chart: Chart
) -> Iterator[ET.Element]:
    """A number over the bar for every step that has room; they are the numbers of the list below."""
    last: dict[int, float] = {}
    for number, step in enumerate(steps, start=1):
        x, y = scale.x(step.ts), lanes[step.attempt]
        colour = _colour(step, chart)
        yield element(
            "line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=y - 4, y2=y + _BAR, stroke=colour, stroke_width=1.5
        )
        if x - last.get(step.attempt, -99.0) >= _NUMBER_WIDTH:
            last[step.attempt] = x
            yield text(x, y - 6, str(number), fill=colour, font_size=9, text_anchor="middle")


def _colour(step: Step, chart: Chart) -> str:
    if step.source is not None:
        arc = chart.target(step.source, step.trigger)
        if arc is None or arc.dest != step.dest:
            return BAD
    return TRIGGER_COLOUR.get(step.trigger, TOLD)


def _table(steps: Sequence[Step]) -> Iterator[list[str]]:
    start = steps[0].ts - steps[0].dwell_s
    for number, step in enumerate(steps, start=1):
        dropped = f" (-{step.dropped_tokens})" if step.dropped_tokens else ""
        moved = f"{step.source or '…'} → {step.dest}" if step.source != step.dest else f"{step.dest}, stays"
        why = ", ".join(part for part in (step.reason, step.worker) if part)
        yield [
            str(number),
            f"{step.ts - start:.3f} s",
            step.trigger,
            moved,
            str(step.attempt),
            f"{step.tokens}{dropped}",
            seconds(step.dwell_s),
            step.outcome or "",
            why,
        ]


def _listing(steps: Sequence[Step], chart: Chart, top: float) -> Iterator[ET.Element]:
    for x, head in zip(_COLUMNS, _HEAD, strict=True):
        yield text(x, top, head, fill=SOFT, font_size=9, font_weight="bold")
    for at, (step, row) in enumerate(zip(steps, _table(steps), strict=True), start=1):
        for x, cell, head in zip(_COLUMNS, row, _HEAD, strict=True):
            fill = _colour(step, chart) if head in {"", "trigger"} else INK
            yield text(x, top + at * _ROW, shorten(cell, 70), fill=fill)
