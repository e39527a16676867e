"""The report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lifecycle.analysis.blocks import Block, blocks
from lifecycle.analysis.conformance import VIOLATION_KINDS, counted
from lifecycle.analysis.report import Report
from lifecycle.analysis.words import clock, count, seconds

NAMED_FILES: Final = 3
NEVER_FOLDED: Final = 26


def print_report(report: Report, console: Console) -> None:
    """Print everything that has rows; tables come as wide as the terminal."""
    for line in summary(report):
        console.print(Text(line))
    for block in blocks(report):
        console.print()
        console.print(_table(block))


def summary(report: Report) -> Iterator[str]:
    """What was read, and the verdict."""
    source, damage = report["source"], report["damage"]
    files = ", ".join(source["files"][:NAMED_FILES])
    if len(source["files"]) > NAMED_FILES:
        files += f" and {len(source['files']) - NAMED_FILES} more"
    yield f"{count(source['lines'])} lines of {len(source['processes'])} processes from {files}"
    if source["began"] is not None:
        yield f"{clock(source['began'])}, {seconds(source['seconds'])}; {count(report['rollouts']['total'])} rollouts"
    if damage["lines"]:
        yield f"{count(damage['lines'])} damaged lines were left out, see below"
    if any(not process["table_in_log"] for process in source["processes"]):
        yield "some processes do not carry their table (no engine.started): that of this version stands in"
    if report.violations is not None:
        yield verdict(report)


def verdict(report: Report) -> str:
    """The result of `--strict` in one sentence."""
    found = counted(report.violations or ())
    if not found:
        return f"strict: no violations ({len(VIOLATION_KINDS)} kinds checked)"
    kinds = ", ".join(f"{count(n)} x {kind}" for kind, n in found.items())
    return f"strict: {count(sum(found.values()))} violations: {kinds}"


def _table(block: Block) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        title=block.title,
        caption=block.note,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
    )
    for index, column in enumerate(block.columns):
        numeric = any(row[index].value is not None for row in block.rows)
        widest = max(len(row[index].text) for row in block.rows)
        table.add_column(
            column,
            justify="right" if numeric else "left",
            overflow="fold",
            min_width=min(widest, NEVER_FOLDED),
        )
    for row in block.rows:
        table.add_row(*(Text(cell.text) for cell in row))
    return table
