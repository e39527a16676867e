"""Labels of edges: over every line, with a halo, and close enough to their own line to be read as its name."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_FAR = 7.0  # a gap that a reader could mistake for belonging to another line
_CLOSE = 3.0  # the gap left after moving
_CHAR = 5.8  # mean width of a character at 10 points
_LINE = 12.0  # height of a line of text
_SAMPLES = 12  # points per Bézier segment

Point = tuple[float, float]
Box = tuple[float, float, float, float]


def lift_labels(drawing: ET.Element, namespace: str, paper: str) -> ET.Element:
    """Take the texts of all edges out of a Graphviz drawing; return them as a group to be drawn last."""
    labels = ET.Element(f"{{{namespace}}}g", {"class": "labels"})
    halo = {"stroke": paper, "stroke-width": "3", "stroke-linejoin": "round", "paint-order": "stroke"}
    for edge in drawing.iterfind(f"{{{namespace}}}g"):
        if not edge.get("class", "").startswith("edge"):
            continue
        path = edge.find(f".//{{{namespace}}}path")
        texts = _take_texts(edge, f"{{{namespace}}}text")
        if path is None or not texts:
            continue
        dx, dy = _shift(path, texts)
        for label in texts:
            label.attrib.update(halo)
            label.set("x", f"{float(label.get('x', '0')) + dx:.2f}")
            label.set("y", f"{float(label.get('y', '0')) + dy:.2f}")
            labels.append(label)
    return labels


def _take_texts(edge: ET.Element, tag: str) -> list[ET.Element]:
    taken = []
    for parent in list(edge.iter()):
        for label in parent.findall(tag):
            parent.remove(label)
            taken.append(label)
    return taken


def _shift(path: ET.Element, texts: Sequence[ET.Element]) -> Point:
    """How far to move a label: towards its line where it is far from it, else up by what a thick line takes."""
    points = list(sample(path.get("d", "")))
    dx, dy = gap(_box(texts), points)
    distance = math.hypot(dx, dy)
    if distance > _FAR:
        part = (distance - _CLOSE) / distance
        return dx * part, dy * part
    return 0.0, -(float(path.get("stroke-width", "1")) / 2 + 0.5)


def _box(texts: Sequence[ET.Element]) -> Box:
    """Left, top, right, bottom of centred lines of text; the width is an estimate."""
    middle = float(texts[0].get("x", "0"))
    half = max(len(line.text or "") for line in texts) * _CHAR / 2
    baselines = [float(line.get("y", "0")) for line in texts]
    return middle - half, min(baselines) - _LINE + 3, middle + half, max(baselines) + 3


def sample(d: str) -> Iterator[Point]:
    """Points along an SVG path of one move and cubic Bézier segments, which is what Graphviz writes."""
    numbers = [float(number) for number in _NUMBER.findall(d)]
    points = list(zip(numbers[::2], numbers[1::2], strict=True))
    for at in range(0, len(points) - 3, 3):
        (x0, y0), (x1, y1), (x2, y2), (x3, y3) = points[at : at + 4]
        for step in range(_SAMPLES + 1):
            t = step / _SAMPLES
            a, b, c, e = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3
            yield a * x0 + b * x1 + c * x2 + e * x3, a * y0 + b * y1 + c * y2 + e * y3


def gap(box: Box, points: Sequence[Point]) -> Point:
    """The shortest way from a box to any of the points, (0, 0) if one lies inside."""
    left, top, right, bottom = box

    def way(point: Point) -> Point:
        x, y = point
        return x - min(max(x, left), right), y - min(max(y, top), bottom)

    return min(map(way, points), key=lambda step: math.hypot(*step), default=(0.0, 0.0))
