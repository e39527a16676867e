"""The report as one HTML file that needs nothing else: styles, plots and the little script are inside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from lifecycle.analysis.blocks import Block, blocks
from lifecycle.analysis.pictures import pictures
from lifecycle.analysis.plots import plain
from lifecycle.analysis.render import summary, verdict
from lifecycle.analysis.report import Report
from lifecycle.analysis.words import count, seconds, share
from lifecycle.errors import ConfigurationError

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
LONG: Final = 40
FOOTER: Final = (
    "<footer>Made from logs by <code>lifecycle report</code>. Times are wall clock, in UTC. "
    "Every number is in <code>--json</code> too.</footer>"
)
_XML_HEAD = re.compile(r"^\s*(<\?xml[^>]*\?>|<!DOCTYPE[^>]*>|<!--.*?-->|\s)*", re.DOTALL)


def write_page(report: Report, path: Path, *, drawings: Mapping[str, str] | None = None) -> None:
    """Write the page. `drawings` are the machines as SVG, by name: `rollout` and `gate`.

    Raises ConfigurationError when the file cannot be written.
    """
    text = page(report, drawings or {})
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write the page {path}: {error.strerror}") from error


def page(report: Report, drawings: Mapping[str, str]) -> str:
    """The whole document."""
    title = "Rollout lifecycle report"
    tables = list(blocks(report))
    body = [
        f"<h1>{title}</h1>",
        *(
            f'<p class="lead">{escape(line)}</p>'
            for line in summary(report)
            if not line.startswith("strict:")
        ),
        _verdict(report),
        _tiles(report),
        "<nav>" + "".join(f'<a href="#{block.key}">{escape(block.title)}</a>' for block in tables) + "</nav>",
        *_machines(drawings),
        f'<div class="plots">{"".join(pictures(report))}</div>',
        *map(_section, tables),
        FOOTER,
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_asset('report.css')}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + f"\n</main><script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("lifecycle.analysis").joinpath("assets", name).read_text(encoding="utf-8")


def _verdict(report: Report) -> str:
    if report.violations is None:
        return ""
    kind = "bad" if report.violations else "good"
    return f'<p class="verdict {kind}">{escape(verdict(report))}</p>'


def _tiles(report: Report) -> str:
    tiles = "".join(
        f'<div class="tile{" bad" if bad else ""}"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what, bad in _figures(report)
    )
    return f'<div class="tiles">{tiles}</div>'


def _figures(report: Report) -> Iterator[tuple[str, str, bool]]:
    rollouts, tokens = report["rollouts"], report["tokens"]
    delivered = rollouts["dispositions"].get("delivered", 0)
    yield count(rollouts["total"]), "rollouts", False
    yield share(delivered, rollouts["total"]), "of them delivered", False
    yield plain(tokens["observed"]), "tokens observed", False
    yield share(tokens["wasted"], tokens["observed"] + tokens["brought"]), "of them wasted", False
    yield plain(tokens["kept_by_resuming"]), "tokens kept by resuming", False
    yield seconds(report["first_token"]["p50_s"]), "to the first token, median", False
    yield _abort_p95(report), "abort latency, p95 (confirmed)", False
    yield share(report["gate"]["shut_share"]), "of the time the gate was shut", False
    yield count(report["orphans"]["count"]), "orphans", report["orphans"]["in_closed_logs"] > 0
    yield count(_expired(report)), "aborts expired", _expired(report) > 0


def _outcome(report: Report, name: str) -> dict[str, Any]:
    return next((row for row in report["aborts"]["outcomes"] if row["outcome"] == name), {})


def _abort_p95(report: Report) -> str:
    return seconds(_outcome(report, "confirmed").get("p95_s"))


def _expired(report: Report) -> int:
    return int(_outcome(report, "expired").get("count", 0))


def _machines(drawings: Mapping[str, str]) -> Iterator[str]:
    for name, svg in drawings.items():
        small = "" if name == "rollout" else " small"
        yield (
            f'<figure class="wide"><figcaption>The {escape(name)} machine, with what happened on it</figcaption>'
            f'<div class="machine{small}" tabindex="0">{_XML_HEAD.sub("", svg)}</div></figure>'
        )


def _section(block: Block) -> str:
    numeric = [any(row[index].value is not None for row in block.rows) for index in range(len(block.columns))]
    head = "".join(
        f'<th scope="col"{" class=n" if is_number else ""}><button type="button">{escape(column)}</button></th>'
        for column, is_number in zip(block.columns, numeric, strict=True)
    )
    rows = "".join("<tr>" + "".join(map(_cell, row, numeric)) + "</tr>" for row in block.rows)
    return (
        f'<section class="block" id="{block.key}"><h2>{escape(block.title)}</h2><p class="note">{escape(block.note)}</p>'
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _cell(cell: Any, numeric: bool) -> str:
    if numeric:
        value = -1 if cell.value is None else cell.value
        return f'<td class="n" data-v="{value:g}">{escape(cell.text)}</td>'
    return f"<td{' class=long' if len(cell.text) > LONG else ''}>{escape(cell.text)}</td>"
