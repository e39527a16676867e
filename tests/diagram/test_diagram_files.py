"""The committed files: written, compared, and mended by one command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lifecycle.diagram import Chart, check, live_charts, write
from lifecycle.diagram.chart import key_of
from lifecycle.diagram.files import fill_blocks
from lifecycle.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
CHARTS = live_charts()
README = "before\n<!-- lifecycle:diagram gate -->\nold\n<!-- /lifecycle:diagram -->\nafter\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkout with a marked README and freshly written pictures."""
    (tmp_path / "README.md").write_text(README)
    write(CHARTS, tmp_path / "diagrams")
    return tmp_path / "diagrams"


def changed(name: str = "rollout") -> dict[str, Chart]:
    """The tables of tomorrow: one arc leads elsewhere."""
    chart = CHARTS[name]
    arcs = tuple(
        arc._replace(dest="discarded") if key_of(arc) == ("pending", "abort", "aborted") else arc
        for arc in chart.arcs
    )
    return {**CHARTS, name: replace(chart, arcs=arcs, hash="another")}


def test_the_committed_pictures_agree_with_the_tables() -> None:
    """What `make check` looks at."""
    assert check(CHARTS, ROOT / "diagrams") == []


def test_what_was_just_written_agrees_and_needs_no_second_writing(directory: Path) -> None:
    """Writing is idempotent, and touches nothing that is right."""
    assert {path.name for path in directory.iterdir()} == {
        *(f"{name}.{suffix}" for name in CHARTS for suffix in ("mmd", "dot", "md", "json", "svg")),
        "README.md",
    }
    assert check(CHARTS, directory) == []
    assert write(CHARTS, directory) == []


def test_one_changed_arc_shows_as_one_changed_line_in_every_form(directory: Path) -> None:
    """The diff is what a reviewer reads: the old line, the new line, and the hash."""
    drifts = {drift.path.name: drift for drift in check(changed(), directory)}
    assert set(drifts) == {"rollout.mmd", "rollout.dot", "rollout.md", "rollout.json", "rollout.svg"}
    mermaid = drifts["rollout.mmd"].diff.splitlines()
    assert "-    pending --> aborted: abort" in mermaid
    assert "+    pending --> discarded: abort" in mermaid
    assert sum(line.startswith("+ ") for line in mermaid) == 2  # the arc, and the line with the hash
    assert drifts["rollout.svg"].problem == "was drawn from another table"
    assert drifts["rollout.svg"].diff == ""


def test_svg_bytes_are_never_compared(directory: Path) -> None:
    """Another version of the layout draws other bytes from the same table, and that is fine."""
    svg = directory / "gate.svg"
    svg.write_text(svg.read_text().replace("<path ", "<path  "))
    assert check(CHARTS, directory) == []


def test_a_missing_or_unreadable_file_is_a_drift_and_no_traceback(directory: Path) -> None:
    """Deleted, or replaced by something that is no text."""
    (directory / "gate.mmd").unlink()
    (directory / "gate.dot").write_bytes(b"\xff\xfe")
    (directory / "gate.svg").unlink()
    (directory / "rollout.svg").unlink()
    (directory / "rollout.svg").mkdir()
    problems = {drift.path.name: drift.problem for drift in check(CHARTS, directory)}
    assert problems["gate.mmd"] == problems["gate.svg"] == "is missing"
    assert problems["gate.dot"].startswith("cannot be read")
    assert problems["rollout.svg"].startswith("cannot be read")


def test_the_marked_block_of_the_readme_is_filled_and_compared(directory: Path) -> None:
    """Only between the markers; everything else of the README is its author's."""
    readme = directory.parent / "README.md"
    text = readme.read_text()
    assert text.startswith("before\n<!-- lifecycle:diagram gate -->\n```mermaid\n")
    assert "    open --> pausing: pause\n" in text
    assert text.endswith("```\n<!-- /lifecycle:diagram -->\nafter\n")
    readme.write_text(text.replace("open --> pausing", "open --> paused"))
    (drift,) = check(CHARTS, directory)
    assert drift.path.resolve() == readme
    assert "+    open --> pausing: pause" in drift.diff.splitlines()


def test_a_block_for_an_unknown_machine_is_refused_by_name() -> None:
    """A typing error in a marker must not pass as no marker."""
    with pytest.raises(ConfigurationError, match="'gates'; there is rollout and gate"):
        fill_blocks(README.replace("diagram gate", "diagram gates"), CHARTS, "README.md")


def test_a_readme_without_markers_is_left_alone(directory: Path) -> None:
    """Nobody is forced to show a picture."""
    readme = directory.parent / "README.md"
    readme.write_text("plain")
    assert write(CHARTS, directory) == []
    assert readme.read_text() == "plain"


def test_a_png_that_the_docs_show_is_compared_and_mended(directory: Path) -> None:
    """Only where there is one: the documentation decides what it shows."""
    png = directory.parent / "docs" / "img" / "gate.png"
    png.parent.mkdir(parents=True)
    png.write_bytes(b"old")
    (drift,) = check(CHARTS, directory)
    assert (drift.path.resolve(), drift.problem) == (png, "was drawn from another table")
    assert [path.resolve() for path in write(CHARTS, directory)] == [png]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert check(CHARTS, directory) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file stands where the directory should be."""
    (tmp_path / "diagrams").write_text("in the way")
    with pytest.raises(ConfigurationError, match=r"cannot write .*diagrams"):
        write(CHARTS, tmp_path / "diagrams")
