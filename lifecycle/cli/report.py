"""`lifecycle report`: what happened, from logs alone."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from lifecycle.analysis.report import Report
    from lifecycle.analysis.sources import Source

T = TypeVar("T")
EXIT_VIOLATIONS = 3
SHOWN_VIOLATIONS = 20


@click.command()
@click.argument("logs", nargs=-1, required=True, metavar="LOG…")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), help="Write it as one self-contained page."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write time lines for Perfetto or chrome://tracing.",
)
@click.option(
    "--strict", is_flag=True, help="Replay every rollout on the table in the log; exit 3 on violations."
)
@click.option(
    "--memory", metavar="SIZE", help="Bound of the database's buffers, for example 2GB; more goes to disk."
)
@click.pass_context
def report(
    context: click.Context,
    logs: tuple[str, ...],
    as_json: bool,
    html: Path | None,
    trace: Path | None,
    strict: bool,
    memory: str | None,
) -> None:
    """Say what happened: what leaked, what aborts cost, which worker is slow, how stale the tokens are.

    LOG is a file (JSON lines, plain, .gz or .zst, or Parquet), a glob, or a directory. Several processes and runs may
    be read together.
    """
    from lifecycle.analysis import find_sources, write_trace

    sources = find_sources(logs)
    with nullcontext() if trace is None else beside(lambda: write_trace(sources, trace)) as events:
        # Time lines need no database, and have a core of their own: beside one thread for each they would end last.
        threads = None if trace is None else max(1, (os.cpu_count() or 1) - 1)
        made = make_report(sources, strict=strict, memory=memory, threads=threads)
        if as_json:
            click.echo(json.dumps(made.as_dict(), indent=2))
        elif html is None and trace is None:
            _print(made)
        if html is not None:
            write_html(made, html)
            click.echo(f"wrote {html}", err=True)
        if events is not None:
            click.echo(f"wrote {trace}: {events.result():,} events", err=True)
    if strict:
        _say_verdict(context, made)


@contextmanager
def beside(work: Callable[[], T]) -> Iterator[Future[T]]:
    """Do `work` in a thread while this block runs. After an error it is waited for, after Ctrl-C it is not."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001  it belongs to the one who asks for the result
            done.set_exception(error)

    threading.Thread(target=run, name="lifecycle-trace", daemon=True).start()
    try:
        yield done
    except Exception:
        wait([done])
        raise


def make_report(
    sources: Sequence[Source], *, strict: bool = False, memory: str | None = None, threads: int | None = None
) -> Report:
    """Read the logs and answer everything; with `strict` the rollouts are replayed too."""
    from lifecycle.analysis import Warehouse, build_report, find_violations

    with Warehouse(sources, strict=strict, memory=memory, threads=threads) as warehouse:
        violations = find_violations(warehouse) if strict else None
        return build_report(warehouse, violations)


def write_html(made: Report, path: Path) -> None:
    """Write the page, with the machines drawn from the logs' own tables."""
    from lifecycle.analysis import write_page

    write_page(made, path, drawings=draw_machines(made))


def draw_machines(made: Report) -> dict[str, str]:
    """The SVG of both machines with the counts of the report on their arcs; the newest table in the logs."""
    from lifecycle.diagram import ArcFigures, LogFigures, chart_from, live_charts, log_layer, to_svg

    counts: dict[str, list[dict[str, Any]]] = {
        "rollout": made["transitions"],
        "gate": made["gate"]["transitions"],
    }
    tables = made.tables[-1] if made.tables else {}
    drawn: dict[str, str] = {}
    for name, rows in counts.items():
        chart = chart_from(tables[name], "engine.started") if name in tables else live_charts()[name]
        arcs = {
            (row["source"], row["trigger"], row["dest"]): ArcFigures(
                row["count"], 0, row["p50_s"], row["p95_s"]
            )
            for row in rows
            if row["count"]
        }
        taken = sum(row["count"] for row in rows)
        drawn[name] = to_svg(chart, log_layer(chart, LogFigures(f"{taken:,} transitions", arcs)))
    return drawn


def _print(made: Report) -> None:
    from rich.console import Console

    from lifecycle.analysis.render import print_report

    print_report(made, Console(highlight=False, soft_wrap=False))


def _say_verdict(context: click.Context, made: Report) -> None:
    from lifecycle.analysis.render import verdict

    found = made.violations or ()
    for violation in found[:SHOWN_VIOLATIONS]:
        click.echo(str(violation), err=True)
    if len(found) > SHOWN_VIOLATIONS:
        click.echo(
            f"… and {len(found) - SHOWN_VIOLATIONS:,} more; all of the first thousand are in --json", err=True
        )
    click.echo(verdict(made), err=True)
    if found:
        context.exit(EXIT_VIOLATIONS)
