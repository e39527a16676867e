"""Which plots the page has, and what they say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from typing import Any, Final

from lifecycle.analysis import plots
from lifecycle.analysis.report import Report
from lifecycle.analysis.words import count, seconds, share

A_DAY_S: Final = 86_400.0
PLACES: Final = (
    ("delivered", "delivered", "blue"),
    ("undelivered", "completed, not handed over", "teal"),
    ("carried", "carried", "violet"),
    ("in_flight", "in flight", "amber"),
    ("wasted", "wasted", "red"),
)
HISTOGRAMS: Final = (
    ("first_token_s", "Time to first token", "of an attempt, from dispatch", "blue"),
    ("abort_latency_s", "Abort latency", "from asking to the answer", "amber"),
    ("rollout_duration_s", "Duration of rollouts", "from submit to a final state", "teal"),
)


def pictures(report: Report) -> Iterator[str]:
    """The figures that have data."""
    yield from _tokens(report)
    yield from _series(report)
    for key, title, note, hue in HISTOGRAMS:
        yield from _histogram(report["distributions"][key], title, note, hue)
    yield from _lag(report["staleness"]["lag_at_delivery"])
    yield from _attempts(report["attempts"])
    yield from _workers(report["workers"]["workers"])


def _figure(title: str, note: str, drawing: str, *, wide: bool = False) -> str:
    kind = ' class="wide"' if wide else ""
    return f"<figure{kind}><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{drawing}</figure>"


def _tokens(report: Report) -> Iterator[str]:
    tokens = report["tokens"]
    total = sum(tokens[key] for key, _, _ in PLACES)
    if not total:
        return
    parts = [
        (name, float(tokens[key]), hue, f"{name}: {count(tokens[key])} ({share(tokens[key], total)})")
        for key, name, hue in PLACES
        if tokens[key]
    ]
    legend = "".join(f'<li class="{hue}"><i></i>{escape(hint)}</li>' for _, _, hue, hint in parts)
    note = f"{count(total)} tokens; resuming kept {count(tokens['kept_by_resuming'])} that a restart would have thrown away"
    drawing = plots.stacked(parts, "Where the tokens are") + f'<ul class="legend">{legend}</ul>'
    yield _figure("Where the tokens are", note, drawing, wide=True)


def _series(report: Report) -> Iterator[str]:
    points = report["series"]
    if not any(point["dispatched"] for point in points):
        return
    for key, title, note, hue in (
        ("in_flight", "Requests in flight", "at the end of each interval", "green"),
        ("tokens_per_s", "Tokens per second", "spread over each stream", "blue"),
    ):
        marks = [
            plots.Mark(
                point["ts"], point[key], f"{_time(point['ts'], dated=True)}: {plots.plain(point[key])}"
            )
            for point in points
        ]
        long = points[-1]["ts"] - points[0]["ts"] > A_DAY_S
        yield _figure(title, note, plots.area(marks, title, hue, partial(_time, dated=long)))


def _time(ts: float, *, dated: bool) -> str:
    return datetime.fromtimestamp(ts, UTC).strftime("%m-%d %H:%M:%S" if dated else "%H:%M:%S")


def _histogram(rows: Sequence[dict[str, Any]], title: str, note: str, hue: str) -> Iterator[str]:
    if not rows:
        return
    marks = [
        plots.Mark(
            row["from_s"],
            row["count"],
            f"{seconds(row['from_s'])} to {seconds(row['from_s'] * 10**0.1)}: {count(row['count'])}",
        )
        for row in rows
    ]
    yield _figure(title, f"{note}; logarithmic", plots.histogram(marks, title, hue, _axis_time))


def _axis_time(value: float) -> str:
    return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"


def _attempts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    marks = [
        plots.Mark(row["attempts"], row["rollouts"], f"{row['attempts']} attempts: {count(row['rollouts'])}")
        for row in rows
        if row["attempts"] is not None
    ]
    if marks:
        yield _figure(
            "Attempts", "requests that a rollout needed", plots.columns(marks, "Attempts", "violet")
        )


def _lag(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    total = sum(row["rollouts"] for row in rows)
    marks = [
        plots.Mark(
            row["lag"],
            row["rollouts"],
            f"{row['lag']} behind: {count(row['rollouts'])} ({share(row['rollouts'], total)})",
        )
        for row in rows
    ]
    note = "weight versions the oldest token was behind when delivered"
    yield _figure("Staleness", note, plots.columns(marks, "Staleness", "red"))


def _workers(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    known = [row for row in rows if row["first_token"]["p50_s"] is not None]
    ranges = [
        plots.Range(
            str(row["worker"] or "hidden by a router").removeprefix("http://"),
            row["first_token"]["p50_s"],
            row["first_token"]["p95_s"],
            row["first_token"]["p99_s"],
            f"{row['worker']}: p50 {seconds(row['first_token']['p50_s'])}, p95 {seconds(row['first_token']['p95_s'])}, "
            f"p99 {seconds(row['first_token']['p99_s'])}",
        )
        for row in known[:40]
    ]
    if ranges:
        note = "time to first token: dot p50, thick to p95, thin to p99"
        yield _figure("Workers", note, plots.ranges(ranges, "Time to first token by worker", seconds))
