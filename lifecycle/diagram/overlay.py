"""What happened, drawn over what may happen: counts and times from logs, or the arcs a test run exercised.

Figures come in as plain data. Where they come from, a log file or a test run, is not this module's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lifecycle.diagram.chart import ArcKey, Chart, key_of
from lifecycle.diagram.dot import Layer, Mark
from lifecycle.diagram.markdown import grid
from lifecycle.diagram.style import BAD, FAINT, GOOD, INK
from lifecycle.machine import Arc, ArcKind

_THIN, _THICK = 1.0, 6.0  # points
_CONTRAST = 0.4  # 1 would hide what is rare, 0 would make everything equal


@dataclass(frozen=True)
class ArcFigures:
    """How often an arc was taken, by how many different rollouts, and the time spent before it, in seconds."""

    count: int
    rollouts: int
    p50: float | None
    p95: float | None


@dataclass(frozen=True)
class LogFigures:
    """What logs say about one machine. `rollouts` is how many there were; 0 for the gate, which has none."""

    title: str
    arcs: Mapping[ArcKey, ArcFigures]
    rollouts: int = 0

    def share(self, key: ArcKey) -> float | None:
        """The part of all rollouts that took this arc at least once, 0 to 1, or None where there are no rollouts."""
        figures = self.arcs.get(key)
        return figures.rollouts / self.rollouts if figures and self.rollouts else None


def log_layer(chart: Chart, figures: LogFigures) -> Layer:
    """Edges by count: thick is often, dashed is never, red is what the table does not allow."""
    most = max((arc.count for arc in figures.arcs.values()), default=1)
    strangers = _strangers(chart, figures)
    counted = "count (share of rollouts)" if figures.rollouts else "count"
    legend = [
        (INK, "solid", f"taken: {counted}, then p50 / p95 of the time spent before it; thick: often"),
        (FAINT, "dashed", "never taken"),
    ]
    if any(arc.kind is ArcKind.MORE for arc in chart.arcs):
        legend.append((FAINT, "dotted", "not logged"))
    if strangers:
        legend.append((BAD, "solid", "not allowed by the table"))
    marks = {key_of(arc): _log_mark(arc, figures, most) for arc in chart.arcs}
    marks |= {key_of(arc): _taken(arc, figures, most, BAD) for arc in strangers}
    known = set(chart.states)
    new = sorted({state for arc in strangers for state in (arc.source, arc.dest)} - known)
    return Layer(
        title=f"The {chart.name} machine: {figures.title}",
        marks=marks,
        extra_arcs=strangers,
        extra_states=tuple(new),
        state_colours=dict.fromkeys(new, BAD),
        legend=tuple(legend),
    )


def _strangers(chart: Chart, figures: LogFigures) -> tuple[Arc, ...]:
    own = {key_of(arc) for arc in chart.arcs}
    return tuple(
        Arc(*key, ArcKind.NOOP if key[0] == key[2] else ArcKind.MOVE, "not in the table")
        for key in sorted(figures.arcs)
        if key not in own
    )


def _log_mark(arc: Arc, figures: LogFigures, most: int) -> Mark:
    if key_of(arc) in figures.arcs:
        return _taken(arc, figures, most, None)
    if arc.kind is ArcKind.MORE:
        return Mark(note="not logged", style="dotted")
    return Mark(note="never", colour=FAINT, width=_THIN, style="dashed")


def _taken(arc: Arc, figures: LogFigures, most: int, colour: str | None) -> Mark:
    arc_figures = figures.arcs[key_of(arc)]
    width = _THIN + (_THICK - _THIN) * (arc_figures.count / max(most, 1)) ** _CONTRAST
    share = figures.share(key_of(arc))
    note = f"{arc_figures.count:,}" + ("" if share is None else f" ({percent(share)})")
    if arc.source != arc.dest and arc_figures.p50 is not None and arc_figures.p95 is not None:
        note += f"\n{seconds(arc_figures.p50)} / {seconds(arc_figures.p95)}"
    return Mark(
        note=note, colour=colour, width=min(width, 2.5) if arc.source == arc.dest else width, style="solid"
    )


def percent(share: float) -> str:
    """A share as text that never rounds something to nothing, nor almost all to all."""
    text = f"{share:.1%}"
    if text == "0.0%" and share > 0:
        return "<0.1%"
    if text == "100.0%":
        return ">99.9%" if share < 1 else "100%"
    return text


def seconds(value: float) -> str:
    """A duration as a person would say it, three digits at most."""
    units = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
    for unit, size in units:
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return "0 s"


def log_rows(chart: Chart, figures: LogFigures) -> Iterator[dict[str, Any]]:
    """The figures as rows, one per arc: those of the table in its order, then what it does not allow."""
    for arc in (*chart.arcs, *_strangers(chart, figures)):
        found = figures.arcs.get(key_of(arc), ArcFigures(0, 0, None, None))
        yield {
            "source": arc.source,
            "trigger": arc.trigger,
            "dest": arc.dest,
            "count": None if arc.kind is ArcKind.MORE and not found.count else found.count,
            "rollouts": found.rollouts,
            "share": figures.share(key_of(arc)),
            "p50_s": found.p50,
            "p95_s": found.p95,
            "allowed": chart.target(arc.source, arc.trigger) == arc,
        }


def log_markdown(chart: Chart, figures: LogFigures) -> str:
    """The figures as a Markdown table, for a terminal or a ticket."""
    rows = (
        [
            f"`{row['source']}`",
            f"`{row['trigger']}`",
            f"`{row['dest']}`" + ("" if row["allowed"] else " **not allowed**"),
            "not logged" if row["count"] is None else f"{row['count']:,}" if row["count"] else "never",
            "" if row["share"] is None else percent(row["share"]),
            "" if row["p50_s"] is None else seconds(row["p50_s"]),
            "" if row["p95_s"] is None else seconds(row["p95_s"]),
        ]
        for row in log_rows(chart, figures)
    )
    head = ["from", "trigger", "to", "count", "share of rollouts", "p50 before", "p95 before"]
    return "\n".join([f"# The {chart.name} machine: {figures.title}", "", *grid(head, rows)]) + "\n"


def coverage_layer(chart: Chart, hits: Mapping[tuple[str, str], int]) -> Layer:
    """Which arcs a test run exercised, by (state, trigger): green with the count, or dashed red."""
    marks = {}
    for arc in chart.arcs:
        count = hits.get((arc.source, arc.trigger), 0)
        marks[key_of(arc)] = (
            Mark(note=f"{count:,}", colour=GOOD, style="solid")
            if count
            else Mark(note="never", colour=BAD, width=2, style="dashed")
        )
    covered = sum(mark.colour == GOOD for mark in marks.values())
    return Layer(
        title=f"The {chart.name} machine: {covered} of {len(chart.arcs)} arcs exercised by the tests",
        marks=marks,
        legend=((GOOD, "solid", "exercised, and how often"), (BAD, "dashed", "never exercised")),
    )
