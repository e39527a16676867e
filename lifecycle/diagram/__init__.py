"""Pictures of the machines, drawn from the live tables; and what logs and test runs say, drawn over them.

    chart     a machine as plain data: from a table, or from the JSON form of an older one
    mermaid   `stateDiagram-v2`, for pull requests
    dot       DOT, whose edges carry weight and colour; layers lie over it
    markdown  every (state, trigger) pair, with the refusals
    svg       SVG and PNG (extra `analysis`)
    overlay   figures from logs, and arcs exercised by a test run
    diff      two versions of one machine
    timeline  one rollout on a time line
    files     the committed files: write and check

It imports `lifecycle.machine` and `lifecycle.states`, and reads no log itself: figures come in as plain data.
"""

from __future__ import annotations

from lifecycle.diagram.chart import Chart, chart_from, chart_of, live_charts
from lifecycle.diagram.diff import Changes, compare, diff_dict, diff_layer, diff_markdown
from lifecycle.diagram.dot import Layer, Mark, to_dot
from lifecycle.diagram.files import Drift, check, to_json, write
from lifecycle.diagram.markdown import to_markdown
from lifecycle.diagram.mermaid import to_mermaid
from lifecycle.diagram.overlay import (
    ArcFigures,
    LogFigures,
    coverage_layer,
    log_layer,
    log_markdown,
    log_rows,
)
from lifecycle.diagram.svg import to_png, to_svg
from lifecycle.diagram.timeline import Step, timeline_dict, timeline_markdown, timeline_svg

__all__ = [
    "ArcFigures",
    "Changes",
    "Chart",
    "Drift",
    "Layer",
    "LogFigures",
    "Mark",
    "Step",
    "chart_from",
    "chart_of",
    "check",
    "compare",
    "coverage_layer",
    "diff_dict",
    "diff_layer",
    "diff_markdown",
    "live_charts",
    "log_layer",
    "log_markdown",
    "log_rows",
    "timeline_dict",
    "timeline_markdown",
    "timeline_svg",
    "to_dot",
    "to_json",
    "to_markdown",
    "to_mermaid",
    "to_png",
    "to_svg",
    "write",
]
