"""The short table a run ends with."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from lifecycle.cli.rundir import RunDirectory
from lifecycle.engine import EngineStats
from lifecycle.errors import SnapshotError
from lifecycle.ledger import LedgerView


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to."""

    ledger: LedgerView
    stats: EngineStats
    groups_written: int
    samples_written: int


def print_summary(
    result: RunResult, directory: RunDirectory, problems: Sequence[SnapshotError], report: str | None
) -> None:
    """Rollouts by place, tokens, aborts, files; on standard output."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("rollouts", justify="right")
    table.add_column("tokens", justify="right")
    ledger = result.ledger
    names = {"resumable": "carried, unfinished", "completed": "carried, complete"}
    for place, count in ledger.rollouts.items():
        if count:
            table.add_row(names.get(place, place), f"{count:,}", f"{ledger.tokens[place]:,}")
    for reason, count in {
        **ledger.wasted,
        **{f"{r} (dropped)": n for r, n in ledger.dropped.items() if n},
    }.items():
        table.add_row(f"wasted: {reason}", "", f"{count:,}")
    if ledger.saved_tokens:
        table.add_row("kept over a resume", "", f"{ledger.saved_tokens:,}")
    console.print(table)
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(result.stats.aborts.items())) or "none"
    console.print(f"aborts: {outcomes}")
    console.print(
        f"samples in {_short(directory.samples)}: {result.samples_written} new, {result.groups_written} groups"
    )
    console.print(f"log {_short(directory.log)}, snapshots {_short(directory.store)}", highlight=False)
    if report:
        console.print(f"report {_short(Path(report))}", highlight=False)
    for problem in problems:
        console.print(f"[red]unreadable:[/red] {problem}", highlight=False)


def _short(path: Path) -> str:
    return os.path.relpath(path) if not os.path.relpath(path).startswith("..") else str(path)
