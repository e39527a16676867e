"""`lifecycle diagram`: the machines as text and pictures, logs drawn over them, and the check of the committed files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lifecycle.errors import ConfigurationError

if TYPE_CHECKING:
    from lifecycle.cli.log_figures import Reading
    from lifecycle.diagram.chart import Chart

FORMATS = ("mermaid", "dot", "svg", "png", "markdown", "json")
SUFFIXES = {
    ".mmd": "mermaid",
    ".mermaid": "mermaid",
    ".dot": "dot",
    ".gv": "dot",
    ".svg": "svg",
    ".png": "png",
    ".md": "markdown",
    ".json": "json",
}
MENDING = "lifecycle diagram --write"
_NO_MERMAID = "Mermaid can neither colour nor weight an edge, nor draw a time line with attempts"

Form = Callable[[], str | bytes]


class Refused(click.ClickException):
    """Bad input: exit status 2, one message, no traceback."""

    exit_code = 2


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    machine: str
    form: str | None
    out: Path | None
    logs: tuple[Path, ...]
    rollout: str | None
    old: Path | None

    def form_or(self, default: str) -> str:
        """The format asked for, else that of the suffix of `--out`, else the default."""
        if self.form or self.out is None:
            return self.form or default
        try:
            return SUFFIXES[self.out.suffix.lower()]
        except KeyError:
            known = ", ".join(SUFFIXES)
            raise Refused(
                f"cannot tell a format from {self.out.name!r}; use --format, or a suffix of {known}"
            ) from None


@click.command()
@click.option("--machine", type=click.Choice(["rollout", "gate"]), default="rollout", show_default=True)
@click.option(
    "--format",
    "form",
    type=click.Choice(FORMATS),
    help="Default: from the suffix of --out, else mermaid or markdown.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="PATH", help="Write there instead of to stdout."
)
@click.option(
    "--check",
    "check_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Compare the files in DIR, and marked blocks of the README beside it, with the tables. Exit 1 if they differ.",
)
@click.option(
    "--write",
    "write_dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write all forms of both machines into DIR, and fill the marked blocks of the README beside it.",
)
@click.option(
    "--log",
    "logs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Draw what this log says over the machine: counts, shares, times, what never and what wrongly happened.",
)
@click.option("--rollout", metavar="ID", help="With --log: one rollout on a time line.")
@click.option(
    "--diff",
    "old",
    type=click.Path(path_type=Path),
    metavar="OLD.json",
    help="Compare with an older table in the JSON form: added green, removed red.",
)
@click.argument("more_logs", nargs=-1, type=click.Path(path_type=Path), metavar="[LOG]...")
def diagram(
    machine: str,
    form: str | None,
    out: Path | None,
    check_dir: Path | None,
    write_dir: Path | None,
    logs: tuple[Path, ...],
    rollout: str | None,
    old: Path | None,
    more_logs: tuple[Path, ...],
) -> None:
    """Draw a machine from its table, and what happened over it."""
    modes = [
        name
        for name, value in (("--check", check_dir), ("--write", write_dir), ("--log", logs), ("--diff", old))
        if value
    ]
    if len(modes) > 1:
        raise click.UsageError(f"{' and '.join(modes)} exclude each other")
    if rollout is not None and not logs:
        raise click.UsageError("--rollout needs a log: add --log FILE")
    if more_logs and not logs:
        raise click.UsageError(f"unexpected argument {str(more_logs[0])!r}; logs are given with --log FILE…")
    if (check_dir or write_dir) and (form or out):
        raise click.UsageError(
            f"{modes[0]} covers both machines and all forms: it takes neither --format nor --out"
        )
    try:
        if check_dir is not None:
            _check(check_dir)
        elif write_dir is not None:
            _write(write_dir)
        else:
            _draw(Wanted(machine, form, out, (*logs, *more_logs), rollout, old))
    except ConfigurationError as error:
        raise Refused(str(error)) from error


def _check(directory: Path) -> None:
    from lifecycle.diagram import check, live_charts

    charts = live_charts()
    drifts = check(charts, directory)
    if not drifts:
        click.echo(f"{directory}: the pictures agree with the tables")
        return
    for chart in charts.values():
        click.echo(_what_changed(directory / f"{chart.name}.json", chart), err=True, nl=False)
    for drift in drifts:
        click.echo(f"{drift.path} {drift.problem}", err=True)
        if drift.diff:
            click.echo(drift.diff, err=True)
    count = f"{len(drifts)} file{'s' if len(drifts) != 1 else ''}"
    click.echo(f"\n{count} out of step with lifecycle/machine.py. To mend: {MENDING} {directory}", err=True)
    raise SystemExit(1)


def _what_changed(committed: Path, chart: Chart) -> str:
    """The change of the table in a reviewer's words; nothing where the committed JSON cannot be read."""
    from lifecycle.diagram import compare, diff_markdown

    try:
        changes = compare(_load(committed, chart.name), chart)
    except (ConfigurationError, Refused):
        return ""
    return "" if changes.empty else diff_markdown(changes) + "\n"


def _write(directory: Path) -> None:
    from lifecycle.diagram import live_charts, write

    changed = write(live_charts(), directory)
    for path in changed:
        click.echo(f"wrote {path}")
    if not changed:
        click.echo(f"{directory}: nothing to change")


def _draw(wanted: Wanted) -> None:
    from lifecycle.diagram import live_charts

    chart = live_charts()[wanted.machine]
    plain = wanted.old is None and not wanted.logs
    form = wanted.form_or("mermaid" if plain else "markdown")
    if form == "mermaid" and not plain:
        raise Refused(f"{_NO_MERMAID}; use dot, svg, png, markdown or json")
    if form == "dot" and wanted.rollout is not None:
        raise Refused("a time line is no graph; use svg, png, markdown or json")
    forms: dict[str, Form]
    if wanted.old is not None:
        forms = _diff_forms(chart, wanted.old)
    elif wanted.rollout is not None:
        forms = _timeline_forms(chart, wanted)
    elif wanted.logs:
        forms = _log_forms(chart, wanted)
    else:
        forms = _plain_forms(chart)
    _put(forms[form](), form, wanted.out)


def _put(result: str | bytes, form: str, out: Path | None) -> None:
    from lifecycle.diagram.files import save

    if out is not None:
        save(out, result.encode() if isinstance(result, str) else result, parents=False)
        return
    if isinstance(result, bytes) and sys.stdout.isatty():
        raise Refused(f"{form} is binary: add --out PATH, or redirect the output")
    click.echo(result, nl=False)


def _plain_forms(chart: Chart) -> dict[str, Form]:
    from lifecycle.diagram import to_dot, to_json, to_markdown, to_mermaid, to_png, to_svg

    return {
        "mermaid": lambda: to_mermaid(chart),
        "dot": lambda: to_dot(chart),
        "svg": lambda: to_svg(chart),
        "png": lambda: to_png(to_svg(chart)),
        "markdown": lambda: to_markdown(chart),
        "json": lambda: to_json(chart),
    }


def _diff_forms(chart: Chart, path: Path) -> dict[str, Form]:
    from lifecycle.diagram import compare, diff_dict, diff_layer, diff_markdown, to_dot, to_png, to_svg

    changes = compare(_load(path, chart.name), chart)
    layer = diff_layer(changes)
    return {
        "dot": lambda: to_dot(chart, layer),
        "svg": lambda: to_svg(chart, layer),
        "png": lambda: to_png(to_svg(chart, layer)),
        "markdown": lambda: diff_markdown(changes),
        "json": lambda: _json(diff_dict(changes)),
    }


def _load(path: Path, machine: str) -> Chart:
    from lifecycle.diagram import chart_from

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refused(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise Refused(
            f"{path} is not JSON: {error}; write one with `lifecycle diagram --format json`"
        ) from error
    old = chart_from(data, str(path))
    if old.name != machine:
        raise Refused(f"{path} holds the machine {old.name!r}; add --machine {old.name}")
    return old


def _log_forms(chart: Chart, wanted: Wanted) -> dict[str, Form]:
    from lifecycle.cli.log_figures import Reading, figures_of
    from lifecycle.diagram import log_layer, log_markdown, log_rows, to_dot, to_png, to_svg

    reading = Reading()
    figures = figures_of(chart.name, wanted.logs, reading)
    _tell(reading, {chart.name: chart.hash})
    layer = log_layer(chart, figures)
    data = {
        "machine": chart.name,
        "hash": chart.hash,
        "rollouts": figures.rollouts,
        "arcs": list(log_rows(chart, figures)),
    }
    return {
        "dot": lambda: to_dot(chart, layer),
        "svg": lambda: to_svg(chart, layer),
        "png": lambda: to_png(to_svg(chart, layer)),
        "markdown": lambda: log_markdown(chart, figures),
        "json": lambda: _json(data),
    }


def _timeline_forms(chart: Chart, wanted: Wanted) -> dict[str, Form]:
    from lifecycle.cli.log_figures import Reading, steps_of
    from lifecycle.diagram import timeline_dict, timeline_markdown, timeline_svg, to_png

    if chart.name != "rollout":
        raise Refused("--rollout draws the rollout machine: leave --machine out")
    assert wanted.rollout is not None
    name, reading = wanted.rollout, Reading()
    steps = steps_of(name, wanted.logs, reading)
    _tell(reading, {chart.name: chart.hash})
    return {
        "svg": lambda: timeline_svg(name, steps, chart),
        "png": lambda: to_png(timeline_svg(name, steps, chart)),
        "markdown": lambda: timeline_markdown(name, steps),
        "json": lambda: _json(timeline_dict(name, steps)),
    }


def _tell(reading: Reading, hashes: Mapping[str, str]) -> None:
    for note in reading.notes(dict(hashes)):
        click.echo(f"note: {note}", err=True)


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, indent=2) + "\n"
