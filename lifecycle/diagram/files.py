"""The committed pictures: write them, and say how they differ from what the tables would draw today."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lifecycle.diagram.chart import Chart
from lifecycle.diagram.dot import to_dot
from lifecycle.diagram.markdown import to_markdown
from lifecycle.diagram.mermaid import to_mermaid
from lifecycle.diagram.svg import digest, drawn_from, to_png, to_svg
from lifecycle.errors import ConfigurationError


def to_json(chart: Chart) -> str:
    """The chart as JSON, one arc a line, so that a diff of it reads."""
    data = chart.as_dict()
    arcs = ",\n".join("    " + json.dumps(arc, ensure_ascii=False) for arc in data.pop("arcs"))
    head = json.dumps(data, ensure_ascii=False, indent=2)
    return head.removesuffix("\n}") + ',\n  "arcs": [\n' + arcs + "\n  ]\n}\n"


TEXT_FORMS: Mapping[str, Callable[[Chart], str]] = {
    "mmd": to_mermaid,
    "dot": to_dot,
    "md": to_markdown,
    "json": to_json,
}
"""File suffix → what writes it. Only texts are compared: the bytes of an SVG depend on the layout's version."""

_BLOCK = re.compile(r"<!-- lifecycle:diagram (\S+) -->\n.*?<!-- /lifecycle:diagram -->", re.DOTALL)


@dataclass(frozen=True)
class Drift:
    """One file that is not what the tables say. `diff` is unified text; empty for an SVG."""

    path: Path
    problem: str
    diff: str = ""


def expected_texts(charts: Mapping[str, Chart], directory: Path) -> dict[Path, str]:
    """Every text file that belongs into `directory`, and the README beside it if that has marked blocks.

    Raises ConfigurationError when the README has a block for a machine that does not exist.
    """
    found = {
        directory / f"{name}.{suffix}": form(chart)
        for name, chart in charts.items()
        for suffix, form in TEXT_FORMS.items()
    }
    found[directory / "README.md"] = _index(charts)
    readme = Path(os.path.relpath(directory.resolve().parent / "README.md"))
    if readme.is_file():
        text = readme.read_text(encoding="utf-8")
        if _BLOCK.search(text):
            found[readme] = fill_blocks(text, charts, str(readme))
    return found


def fill_blocks(text: str, charts: Mapping[str, Chart], where: str) -> str:
    """Put the Mermaid form into every block `<!-- lifecycle:diagram NAME --> … <!-- /lifecycle:diagram -->`."""

    def fill(match: re.Match[str]) -> str:
        chart = charts.get(match[1])
        if chart is None:
            raise ConfigurationError(
                f"{where} asks for the machine {match[1]!r}; there is {' and '.join(charts)}"
            )
        return f"<!-- lifecycle:diagram {match[1]} -->\n```mermaid\n{to_mermaid(chart)}```\n<!-- /lifecycle:diagram -->"

    return _BLOCK.sub(fill, text)


def _index(charts: Mapping[str, Chart]) -> str:
    lines = [
        "# The machines",
        "",
        "Generated from the tables in `lifecycle/machine.py`; edit those, then run",
        "",
        "```",
        "lifecycle diagram --write diagrams/",
        "```",
        "",
        "`lifecycle diagram --check diagrams/` fails when a file here is not what the tables say.",
        "How to read the pictures: [docs/reviewing.md](../docs/reviewing.md).",
    ]
    for name in charts:
        lines += [
            "",
            f"## {name}",
            "",
            f"![The {name} machine]({name}.svg)",
            "",
            f"[every pair as a table]({name}.md) · [Mermaid]({name}.mmd) · [DOT]({name}.dot) · [JSON]({name}.json)",
        ]
    return "\n".join(lines) + "\n"


def check(charts: Mapping[str, Chart], directory: Path) -> list[Drift]:
    """Compare the committed files with the tables. An empty list: they agree.

    SVG and PNG files are never compared byte by byte; each one says which DOT text it was drawn from.
    """
    drifts = [_compare(path, text) for path, text in expected_texts(charts, directory).items()]
    drifts += [_picture_drift(directory / f"{name}.svg", chart) for name, chart in charts.items()]
    drifts += [_picture_drift(path, chart) for path, chart in _shown_in_docs(charts, directory)]
    return [drift for drift in drifts if drift is not None]


def _compare(path: Path, expected: str) -> Drift | None:
    try:
        committed = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Drift(path, "is missing")
    except (OSError, UnicodeDecodeError) as error:
        return Drift(path, f"cannot be read: {error}")
    if committed == expected:
        return None
    diff = difflib.unified_diff(
        committed.splitlines(),
        expected.splitlines(),
        f"{path} (committed)",
        f"{path} (from the tables)",
        lineterm="",
    )
    return Drift(path, "differs from the tables", "\n".join(diff))


def _picture_drift(path: Path, chart: Chart) -> Drift | None:
    try:
        found = drawn_from(path.read_bytes())
    except FileNotFoundError:
        return Drift(path, "is missing")
    except OSError as error:
        return Drift(path, f"cannot be read: {error.strerror}")
    return None if found == digest(chart) else Drift(path, "was drawn from another table")


def _shown_in_docs(charts: Mapping[str, Chart], directory: Path) -> list[tuple[Path, Chart]]:
    """The PNGs that the documentation beside `directory` has of the plain machines; those it has not are not made."""
    docs = Path(os.path.relpath(directory.resolve().parent / "docs" / "img"))
    shown = ((docs / f"{name}.png", chart) for name, chart in charts.items())
    return [(path, chart) for path, chart in shown if path.is_file()]


def write(charts: Mapping[str, Chart], directory: Path) -> list[Path]:
    """Write every form of every chart, and mend the README and the PNGs of the docs beside. Returns what changed.

    Raises ConfigurationError when a file cannot be written, or the analysis extra is missing (SVG needs it).
    """
    texts = expected_texts(charts, directory)
    texts |= {directory / f"{name}.svg": to_svg(chart) for name, chart in charts.items()}
    changed = [path for path, text in texts.items() if not _holds(path, text)]
    for path in changed:
        save(path, texts[path].encode())
    for path, chart in _shown_in_docs(charts, directory):
        if _picture_drift(path, chart):
            save(path, to_png(to_svg(chart)))
            changed.append(path)
    return changed


def _holds(path: Path, text: str) -> bool:
    try:
        return path.read_bytes() == text.encode()
    except OSError:
        return False


def save(path: Path, data: bytes, *, parents: bool = True) -> None:
    """Write a file, with its directories if `parents`. Raises ConfigurationError with the reason when it cannot be."""
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
